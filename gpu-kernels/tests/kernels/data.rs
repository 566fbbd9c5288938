//! Gradients that break things.

use crate::emulated::on_gpu;
use flexcomm_compression::random::Stream;

/// With `FLEXCOMM_TEST_SHORT=1`, where each access is checked by a sanitizer.
fn short() -> bool {
    std::env::var_os("FLEXCOMM_TEST_SHORT").is_some_and(|value| value == "1")
}

/// Those to test: all, or a few.
pub fn lengths() -> Vec<usize> {
    if short() { vec![0, 33, 1025, 4097] } else { LENGTHS.to_vec() }
}

/// One for which every block that a GPU has room for runs, and goes round several times; few for the emulator.
pub fn long() -> usize {
    match (on_gpu(), short()) {
        (true, false) => (1 << 24) + 12_345,
        (true, true) => (1 << 18) + 12_345,
        (false, _) => 20_011,
    }
}

/// Lengths around warps, blocks and tiles.
const LENGTHS: [usize; 14] = [0, 1, 3, 31, 32, 33, 255, 1023, 1025, 4095, 4096, 4097, 10_000, 70_001];

/// Values of any size and sign, as [`gradients`] has them first.
pub fn heavy_tails(n: usize) -> Vec<f32> {
    let stream = Stream::new(n as u64, [0; 4]);
    let sign = |i| if stream.word(i) & 1 == 0 { 1.0f32 } else { -1.0 };
    (0..n as u32).map(|i| sign(i) * (stream.uniform(i) * 4.0 - 2.0).powi(9)).collect()
}

/// A name and n values.
pub fn gradients(n: usize) -> Vec<(&'static str, Vec<f32>)> {
    let stream = Stream::new(n as u64, [0; 4]);
    let make = |f: &dyn Fn(u32) -> f32| (0..n as u32).map(f).collect::<Vec<f32>>();
    let sign = |i| if stream.word(i) & 1 == 0 { 1.0f32 } else { -1.0 };
    vec![
        ("heavy tails", heavy_tails(n)),
        ("ties", make(&|i| sign(i) * (stream.word(i) >> 8 & 7) as f32 * 0.25)),
        ("all alike", vec![0.75; n]),
        ("zeros", make(&|i| if i % 2 == 0 { 0.0 } else { -0.0 })),
        ("denormals", make(&|i| f32::from_bits(stream.word(i) >> 8 & 0x000f_ffff | (i & 1) << 31))),
        ("one bin", make(&|i| f32::from_bits(0x3f80_0000 | stream.word(i) & 0x000f_ffff))),
        ("all magnitudes", make(&|i| f32::from_bits(stream.word(i) & 0xbfff_ffff))),
    ]
}
