#![no_main]
use flexcomm_compression::wire::{
    BitReader, Reader, Writer, read_indices, unpack, unpack_checked, write_indices, write_indices_least,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some(([a, b, c, d], rest)) = data.split_first_chunk::<4>() else { return };
    let (n, k) = (usize::from(u16::from_le_bytes([*a, *b])), usize::from(u16::from_le_bytes([*c, *d])));
    let mut indices = Vec::new();
    if read_indices(&mut Reader::new(rest), n, k, &mut indices).is_ok() {
        assert_eq!(indices.len(), k);
        assert!(indices.is_sorted_by(|a, b| a < b) && indices.last().is_none_or(|last| (*last as usize) < n));
        for write in [write_indices, write_indices_least] {
            let (mut out, mut back) = (Writer::new(), Vec::new());
            write(&indices, n, &mut out);
            read_indices(&mut Reader::new(out.bytes()), n, k, &mut back).expect("what was written");
            assert_eq!(back, indices);
        }
    }
    let (mut gamma, mut delta, mut plain) = (BitReader::new(rest), BitReader::new(rest), BitReader::new(rest));
    while let Ok(value) = gamma.gamma("it") {
        assert!(value > 0);
    }
    while let Ok(value) = delta.delta("it") {
        assert!(value > 0);
    }
    let mut read = 0;
    for width in data.iter().map(|byte| u32::from(byte % 57)) {
        let Ok(value) = plain.get("it", width) else { break };
        assert!(width == 0 && value == 0 || value >> width == 0);
        read += u64::from(width);
        assert_eq!(plain.left() + read, rest.len() as u64 * 8);
    }
    let mut levels = vec![0; n % 300];
    let _ = unpack(&mut Reader::new(rest), "it", 1 + u32::from(*a) % 8, &mut levels);
    let _ = unpack_checked(&mut Reader::new(rest), "it", 2 + u64::from(*b) % 255, &mut levels);
});
