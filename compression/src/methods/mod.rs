//! The registry: every compressor, one file and one line each. `docs/adding.md` says how to add one.
//!
//! Codes on the wire, by class: quantization 16 to 63, sparsification 64 to 111, hybrid 112 to 143, low rank
//! 144 to 175. A code is never used again.

mod hybrid;
mod low_rank;
mod quantization;
mod sparsification;

use crate::entry::Entry;

/// Every compressor.
pub fn all() -> impl Iterator<Item = &'static Entry> {
    let classes: [&'static [Entry]; 4] =
        [quantization::ENTRIES, sparsification::ENTRIES, hybrid::ENTRIES, low_rank::ENTRIES];
    classes.into_iter().flatten()
}

/// The compressor of a code on the wire.
pub fn by_code(code: u8) -> Option<&'static Entry> {
    all().find(|entry| entry.code == code)
}

/// Each compressor with each of its examples.
#[cfg(test)]
pub(crate) fn examples() -> impl Iterator<Item = flexcomm_domain::spec::CompressorSpec> {
    let texts = all().flat_map(|entry| entry.examples.iter().map(|args| format!("{}({args})", entry.info.name)));
    texts.map(|text| text.parse().unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::spec::{Class, MAX_PARAMETERS, compressors::COMPRESSORS};
    use std::collections::BTreeSet;

    #[test]
    fn every_compressor_has_an_entry() {
        let (named, made): (BTreeSet<_>, BTreeSet<_>) =
            (COMPRESSORS.iter().map(|c| c.name).collect(), all().map(|entry| entry.info.name).collect());
        assert_eq!((named.len(), &named), (COMPRESSORS.len(), &made));
        assert!(all().all(|entry| COMPRESSORS.contains(&entry.info)));
    }

    #[test]
    fn names_and_codes_are_unique_and_in_their_class() {
        let (mut names, mut codes) = (BTreeSet::new(), BTreeSet::new());
        for entry in all() {
            assert!(names.insert(entry.info.name), "{} twice", entry.info.name);
            assert!(codes.insert(entry.code), "code {} twice", entry.code);
            let range = match entry.info.class {
                Class::Quantization => 16..=63,
                Class::Sparsification => 64..=111,
                Class::Hybrid => 112..=143,
                Class::LowRank => 144..=175,
            };
            assert!(range.contains(&entry.code), "{}: code {}", entry.info.name, entry.code);
            assert!(entry.info.params.len() <= MAX_PARAMETERS);
            assert!(!entry.examples.is_empty(), "{}: without examples it is not tested", entry.info.name);
        }
    }
}
