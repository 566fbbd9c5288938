//! Fewer values and fewer bits for each.

use crate::strategy::Entry;

/// One line each. Codes 112 to 143.
pub(super) static ENTRIES: &[Entry] = &[];
