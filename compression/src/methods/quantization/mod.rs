//! Fewer bits per value.

mod onebit;

use crate::strategy::Entry;

/// One line each. Codes 16 to 63.
pub(super) static ENTRIES: &[Entry] = &[onebit::ENTRY];
