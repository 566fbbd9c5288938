//! Fewer bits per value.

mod casts;
mod dithering;
mod efsignsgd;
mod eightbit;
mod elias;
mod inceptionn;
mod levels;
mod linear;
mod lpcsvrg;
mod minmax8;
mod natural;
mod onebit;
mod onebitsgd;
mod plain;
mod qsgd;
mod scheme;
mod signs;
mod signsgd;
mod signum;
mod ssdm;
mod terngrad;

use crate::entry::Entry;

/// One line each. Codes 16 to 63.
pub(super) static ENTRIES: &[Entry] = &[
    plain::ENTRY,
    onebit::ENTRY,
    casts::FP16,
    casts::BF16,
    eightbit::ENTRY,
    onebitsgd::ENTRY,
    signsgd::ENTRY,
    signum::ENTRY,
    efsignsgd::ENTRY,
    ssdm::ENTRY,
    qsgd::ENTRY,
    lpcsvrg::ENTRY,
    natural::ENTRY,
    dithering::ENTRY,
    terngrad::ENTRY,
    inceptionn::ENTRY,
    minmax8::ENTRY,
];
