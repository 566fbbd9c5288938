//! The byte format: round trips, golden files, and that no bytes at all can make the reader panic, over-read
//! or over-allocate.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use flexcomm_compression::Compressor;
use flexcomm_compression::{
    Checksum, DecodeError, GradientCompressor, HEADER_BYTES, Layers, Message, Method, Part, Selection, dense_bytes,
    encode, encode_dense, message_bytes,
};
use flexcomm_domain::CompressionRatio;
use proptest::prelude::*;
use std::path::PathBuf;

const SPARSE: [Compressor; 3] = [Compressor::TopK, Compressor::LwTopK, Compressor::MsTopK];

fn bytes_of(compressor: Compressor, selection: &Selection, part: Part, checksum: Checksum) -> Vec<u8> {
    let mut bytes = vec![7; 3];
    encode(compressor, selection, part, checksum, &mut bytes);
    bytes
}

fn selection() -> impl Strategy<Value = Selection> {
    let finite = any::<f32>().prop_filter("finite", |v| v.is_finite());
    prop::collection::vec(prop::option::weighted(0.3, finite), 0..200).prop_map(|values| {
        let kept = values.iter().enumerate().filter_map(|(i, v)| Some((i as u32, (*v)?)));
        let (indices, kept) = kept.unzip();
        Selection::new(values.len(), indices, kept).unwrap()
    })
}

fn checksum() -> impl Strategy<Value = Checksum> {
    prop_oneof![Just(Checksum::None), Just(Checksum::Crc32c)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn what_is_written_is_read(selection in selection(), checksum in checksum(), method in 0usize..3) {
        let bytes = bytes_of(SPARSE[method], &selection, Part::Whole, checksum);
        prop_assert_eq!(bytes.len(), message_bytes(selection.len(), Part::Whole));
        let message = Message::parse(&bytes).unwrap();
        prop_assert_eq!(message.compressor(), SPARSE[method]);
        prop_assert_eq!(message.checksum(), checksum);
        let back = message.to_selection().unwrap();
        prop_assert_eq!((back.n(), back.indices()), (selection.n(), selection.indices()));
        let bits = |s: &Selection| s.values().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&back), bits(&selection));

        let bytes = bytes_of(SPARSE[method], &selection, Part::Indices, checksum);
        prop_assert_eq!(bytes.len(), message_bytes(selection.len(), Part::Indices));
        let message = Message::parse(&bytes).unwrap();
        let mut indices = vec![1, 2, 3];
        message.indices_into(&mut indices);
        prop_assert_eq!(&indices, selection.indices());
        prop_assert!(!message.has_values() && message.to_selection().is_none());
    }

    #[test]
    fn dense_is_read(values in prop::collection::vec(-1e30f32..1e30, 0..100), checksum in checksum()) {
        let mut bytes = Vec::new();
        encode_dense(&values, checksum, &mut bytes);
        prop_assert_eq!(bytes.len(), dense_bytes(values.len()));
        let message = Message::parse(&bytes).unwrap();
        prop_assert!(message.is_dense() && message.has_values() && message.to_selection().is_none());
        prop_assert_eq!(message.n(), values.len() as u64);
        prop_assert_eq!(message.values().collect::<Vec<_>>(), values);
    }

    /// The reader believes nothing: whatever it accepts can be written again to the same bytes.
    #[test]
    fn any_bytes_are_refused_or_true(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Message::parse(&bytes).is_err(), "random bytes without our magic were accepted");
    }

    #[test]
    fn any_header_is_refused_or_true(
        version in prop_oneof![9 => Just(1u8), 1 => any::<u8>()],
        codes in prop::array::uniform3(0u8..5),
        n in prop_oneof![0u64..40, any::<u64>()],
        k in prop_oneof![0u64..20, any::<u64>()],
        kind in 0u8..3,
        reserved in prop_oneof![9 => Just(0u8), 1 => any::<u8>()],
        payload in prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 0..160),
    ) {
        let mut bytes = b"FXCG".to_vec();
        bytes.push(version);
        bytes.extend(codes);
        bytes.extend(n.to_le_bytes());
        bytes.extend(k.to_le_bytes());
        bytes.extend([kind, reserved, 0, 0, 0, 0, 0, 0]);
        bytes.extend(&payload);
        if let Ok(message) = Message::parse(&bytes) {
            check_invariants(&message);
        }
    }

    /// Every bit of a message matters, or its checksum says that it was changed.
    #[test]
    fn a_flipped_bit_is_seen(selection in selection(), at: prop::sample::Index, bit in 0u8..8) {
        let bytes = bytes_of(Compressor::TopK, &selection, Part::Whole, Checksum::Crc32c);
        let mut changed = bytes.clone();
        changed[at.index(bytes.len())] ^= 1 << bit;
        prop_assert!(Message::parse(&changed).is_err());
        let plain = bytes_of(Compressor::TopK, &selection, Part::Whole, Checksum::None);
        let mut changed = plain.clone();
        changed[at.index(plain.len())] ^= 1 << bit;
        if let Ok(message) = Message::parse(&changed) {
            check_invariants(&message);
        }
    }

    #[test]
    fn every_truncation_and_extension_is_refused(selection in selection(), checksum in checksum()) {
        let bytes = bytes_of(Compressor::TopK, &selection, Part::Whole, checksum);
        for end in 0..bytes.len() {
            prop_assert!(Message::parse(&bytes[..end]).is_err(), "cut at {end}");
        }
        let mut longer = bytes;
        longer.push(0);
        prop_assert!(Message::parse(&longer).is_err());
    }

    /// The size that a cost model is told is the size sent.
    #[test]
    fn size_is_known_before(
        lengths in prop::collection::vec(0usize..300, 0..6),
        cr in 0.001..1.0f64,
        method in 0usize..3,
    ) {
        let layers = Layers::new(&lengths).unwrap();
        let gradient: Vec<f32> = (0..layers.values()).map(|i| (i as f32 * 0.7).sin()).collect();
        let method = Method::new(SPARSE[method], CompressionRatio::new(cr).unwrap());
        let mut rank = GradientCompressor::new(layers.clone());
        let sent = rank.compress(method, &gradient, 3).unwrap();
        let bytes = bytes_of(method.compressor, sent.selection, Part::Whole, Checksum::None);
        prop_assert_eq!(bytes.len(), method.message_bytes(&layers));
    }
}

fn check_invariants(message: &Message<'_>) {
    assert!(message.k() as u64 <= message.n() && message.n() <= u64::from(u32::MAX));
    let indices: Vec<u32> = message.indices().collect();
    assert!(indices.is_sorted_by(|a, b| a < b));
    assert!(indices.last().is_none_or(|last| u64::from(*last) < message.n()));
    assert!(message.values().all(f32::is_finite));
    assert_eq!(message.values().len(), if message.has_values() { message.k() } else { 0 });
    assert_eq!(indices.len(), if message.is_dense() { 0 } else { message.k() });
}

/// A header may claim four billion values; nothing is allocated for a claim.
#[test]
fn claims_are_compared_with_the_bytes() {
    let selection = Selection::new(4, vec![1], vec![2.0]).unwrap();
    let good = bytes_of(Compressor::TopK, &selection, Part::Whole, Checksum::None);
    let with = |at: usize, with: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + with.len()].copy_from_slice(with);
        Message::parse(&bytes).unwrap_err()
    };
    let huge = u64::from(u32::MAX).to_le_bytes();
    assert_eq!(
        with(8, &[huge, huge].concat()),
        DecodeError::Length { expected: 32 + 8 * u64::from(u32::MAX), got: 40 }
    );
    let max = u64::MAX.to_le_bytes();
    assert_eq!(with(8, &[max, max].concat()), DecodeError::Count { k: u64::MAX, n: u64::MAX });
    assert_eq!(with(16, &5u64.to_le_bytes()), DecodeError::Count { k: 5, n: 4 });
    assert_eq!(with(0, b"FXCH"), DecodeError::Magic(*b"FXCH"));
    assert_eq!(with(4, &[2]), DecodeError::Version(2));
    assert_eq!(with(5, &[4]), DecodeError::Field { field: "method", value: 4 });
    assert_eq!(with(6, &[2]), DecodeError::Field { field: "dtype", value: 2 });
    assert_eq!(with(7, &[2]), DecodeError::Field { field: "encoding", value: 2 });
    assert_eq!(with(7, &[0]), DecodeError::Count { k: 1, n: 4 });
    assert_eq!(with(24, &[2]), DecodeError::Field { field: "checksum kind", value: 2 });
    assert_eq!(with(27, &[9]), DecodeError::Field { field: "reserved", value: 9 });
    assert_eq!(with(28, &[9]), DecodeError::Field { field: "checksum", value: 9 });
    assert_eq!(with(32, &4u32.to_le_bytes()), DecodeError::Index { position: 0, index: 4, n: 4 });
    assert_eq!(with(36, &f32::INFINITY.to_le_bytes()), DecodeError::Value { position: 0, value: f32::INFINITY });
    assert!(matches!(with(36, &f32::NAN.to_le_bytes()), DecodeError::Value { position: 0, .. }));
    assert_eq!(with(4, &[3]).to_string(), "decode a message of format version 3: this build reads version 1");
    assert_eq!(Message::parse(&good[..HEADER_BYTES - 1]).unwrap_err(), DecodeError::Header(31));
}

#[test]
fn repeated_and_descending_indices_are_refused() {
    let selection = Selection::new(9, vec![3, 5], vec![1.0, 2.0]).unwrap();
    for (second, ok) in [(4u32, true), (3, false), (2, false), (8, true), (9, false)] {
        let mut bytes = bytes_of(Compressor::TopK, &selection, Part::Whole, Checksum::None);
        bytes[36..40].copy_from_slice(&second.to_le_bytes());
        assert_eq!(Message::parse(&bytes).is_ok(), ok, "3 then {second}");
    }
}

fn golden_cases() -> Vec<(&'static str, Vec<u8>)> {
    let selection =
        Selection::new(70_000, vec![0, 1, 255, 65_536, 69_999], vec![1.5, -0.0, 1e-45, -3.402_823_5e38, 0.1]).unwrap();
    let empty = Selection::new(0, vec![], vec![]).unwrap();
    let mut dense = Vec::new();
    encode_dense(&[0.25, -1.0, 1e-38], Checksum::Crc32c, &mut dense);
    vec![
        ("v1-topk.bin", bytes_of(Compressor::TopK, &selection, Part::Whole, Checksum::None)),
        ("v1-lwtopk-crc32c.bin", bytes_of(Compressor::LwTopK, &selection, Part::Whole, Checksum::Crc32c)),
        ("v1-mstopk-indices.bin", bytes_of(Compressor::MsTopK, &selection, Part::Indices, Checksum::None)),
        ("v1-empty.bin", bytes_of(Compressor::TopK, &empty, Part::Whole, Checksum::None)),
        ("v1-dense-crc32c.bin", dense),
    ]
}

/// The files are part of the format and were not written by this crate: a script made them from FORMAT.md.
#[test]
fn golden_files_are_read_and_written() {
    for (name, bytes) in golden_cases() {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        let golden = std::fs::read(&path).unwrap_or_else(|e| panic!("failed to read {}: {e}", path.display()));
        assert_eq!(golden, bytes, "{name} is written differently");
        let message = Message::parse(&golden).unwrap();
        check_invariants(&message);
    }
    let golden = include_bytes!("golden/v1-topk.bin");
    let message = Message::parse(golden).unwrap();
    assert_eq!(message.indices().collect::<Vec<_>>(), [0, 1, 255, 65_536, 69_999]);
    assert_eq!(message.values().last(), Some(0.1));
}
