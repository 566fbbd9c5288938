//! Fewer values.

mod sparse;
mod topk;

use crate::strategy::Entry;

/// One line each. Codes 64 to 111.
pub(super) static ENTRIES: &[Entry] = &[topk::ENTRY];
