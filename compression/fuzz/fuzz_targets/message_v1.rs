#![no_main]
use flexcomm_compression::{Message, Part, encode, encode_dense};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(message) = Message::parse(data) else { return };
    let indices: Vec<u32> = message.indices().collect();
    assert!(indices.is_sorted_by(|a, b| a < b));
    assert!(indices.last().is_none_or(|last| u64::from(*last) < message.n()));
    assert!(message.values().all(f32::is_finite));
    let mut again = Vec::new();
    if message.is_dense() {
        encode_dense(&message.values().collect::<Vec<_>>(), message.checksum(), &mut again);
        // Only `none` writes dense messages; another method's code is kept by the reader, not by the writer.
        assert_eq!(again.len(), data.len());
    } else if let Some(selection) = message.to_selection() {
        encode(message.compressor(), &selection, Part::Whole, message.checksum(), &mut again);
        assert_eq!(again, data);
    }
});
