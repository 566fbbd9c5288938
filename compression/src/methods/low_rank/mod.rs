//! Matrices as products of thin ones.

mod alternating;
mod atomo;
mod eigen;
mod gradiveq;
mod gradzip;
mod matrix;
mod powersgd;

use crate::entry::Entry;

/// One line each. Codes 144 to 175.
pub(super) static ENTRIES: &[Entry] = &[powersgd::ENTRY, gradzip::ENTRY, atomo::ENTRY, gradiveq::ENTRY];
