//! Fewer values and fewer bits for each.

mod adaptivethreshold;
mod hardthreshold;
mod qsparse;
mod signed;
mod sketchml;
mod threelc;

use crate::entry::Entry;

/// One line each. Codes 112 to 143.
pub(super) static ENTRIES: &[Entry] =
    &[qsparse::ENTRY, hardthreshold::ENTRY, adaptivethreshold::ENTRY, sketchml::ENTRY, threelc::ENTRY];
