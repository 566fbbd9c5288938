//! Fewer values.

pub(super) mod adaptive;
mod agreed;
mod dgc;
mod kept_values;
mod lwtopk;
mod mstopk;
mod randomk;
mod sidco;
mod sketched;
pub(super) mod sparse;
pub(super) mod subset;
mod threshold;
pub(super) mod topk;
mod variance;

use crate::entry::Entry;

/// One line each. Codes 64 to 111.
pub(super) static ENTRIES: &[Entry] = &[
    topk::ENTRY,
    randomk::ENTRY,
    threshold::ENTRY,
    lwtopk::ENTRY,
    mstopk::ENTRY,
    dgc::ENTRY,
    dgc::SGC,
    sidco::ENTRY,
    adaptive::ENTRY,
    variance::ENTRY,
    sketched::ENTRY,
];
