//! The registry: every compressor, one file and one line each. `docs/adding.md` says how to add one.
//!
//! Codes on the wire, by class: quantization 16 to 63, sparsification 64 to 111, hybrid 112 to 143, low rank
//! 144 to 175. A code is never used again.

mod hybrid;
mod low_rank;
mod quantization;
mod sparsification;

use crate::strategy::Entry;

/// Every compressor.
pub fn all() -> impl Iterator<Item = &'static Entry> {
    let classes: [&'static [Entry]; 4] =
        [quantization::ENTRIES, sparsification::ENTRIES, hybrid::ENTRIES, low_rank::ENTRIES];
    classes.into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::Class;
    use std::collections::BTreeSet;

    #[test]
    fn names_and_codes_are_unique_and_in_their_class() {
        let (mut names, mut codes) = (BTreeSet::new(), BTreeSet::new());
        for entry in all() {
            assert!(names.insert(entry.name), "{} twice", entry.name);
            assert!(codes.insert(entry.code), "code {} twice", entry.code);
            let range = match entry.class {
                Class::Quantization => 16..=63,
                Class::Sparsification => 64..=111,
                Class::Hybrid => 112..=143,
                Class::LowRank => 144..=175,
            };
            assert!(range.contains(&entry.code), "{}: code {}", entry.name, entry.code);
            assert!(entry.params.len() <= crate::wire::MAX_PARAMETERS);
            assert!(!entry.examples.is_empty(), "{}: without examples it is not tested", entry.name);
        }
    }
}
