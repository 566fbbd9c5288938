//! Matrices as products of thin ones.

use crate::strategy::Entry;

/// One line each. Codes 144 to 175.
pub(super) static ENTRIES: &[Entry] = &[];
