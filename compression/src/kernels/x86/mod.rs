//! AVX2 and AVX-512. Results are those of the portable loops, bit for bit; `vectors.rs` makes all of it safe to call.
#![allow(unsafe_code)]

pub(super) mod compact;
mod draws;
pub(super) mod halves;
pub(super) mod nearest;
pub(super) mod pack;
pub(super) mod partition;
pub(super) mod pass;
pub(super) mod rounding;
pub(super) mod signs;
pub(super) mod steps;
pub(super) mod tables;
pub(super) mod ternary;

use super::{Kernel, Work};
use std::arch::x86_64::*;
use std::sync::LazyLock;

/// Whether the kernel may use AVX2 and FMA, and the processor has them.
pub(super) fn avx2(kernel: Kernel) -> bool {
    kernel != Kernel::Portable && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// The same of AVX-512 with bytes, words and double words, in all lengths, and of what every processor with these has:
/// counts of bits.
pub(super) fn avx512(kernel: Kernel) -> bool {
    kernel == Kernel::Avx512 && *AVX512
}

/// The same of [`avx512`], permutations of bytes and products of bytes.
pub(super) fn avx512_bytes(kernel: Kernel) -> bool {
    kernel == Kernel::Avx512 && *AVX512_BYTES
}

static AVX512_BYTES: LazyLock<bool> =
    LazyLock::new(|| *AVX512 && is_x86_feature_detected!("avx512vbmi") && is_x86_feature_detected!("avx512vnni"));

/// Asked for every few hundred values: one look instead of seven.
static AVX512: LazyLock<bool> = LazyLock::new(|| {
    let lengths = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl");
    let words = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq");
    let bits = is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("bmi2");
    lengths && words && bits && is_x86_feature_detected!("popcnt")
});

/// Lets the compiler check that a function needs no other features than a level stands for: it refuses a safe call from one
/// that has these alone.
macro_rules! with_features_of {
    (avx2, $($call:tt)+) => { with_features_of!("avx2,fma"; $($call)+) };
    (avx512, $($call:tt)+) => {
        with_features_of!("avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2,popcnt"; $($call)+)
    };
    (avx512_bytes, $($call:tt)+) => {
        with_features_of!("avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2,popcnt,avx512vbmi,avx512vnni"; $($call)+)
    };
    ($features:literal; [$($generic:tt)*] ($($argument:ident: $type:ty),+) -> $answer:ty { $function:expr }) => {
        #[target_feature(enable = $features)]
        fn _needs_no_more<$($generic)*>($($argument: $type),+) -> $answer {
            $function($($argument),+)
        }
    };
}
pub(super) use with_features_of;

#[target_feature(enable = "avx2,fma")]
pub(super) fn inside_avx2<O>(work: impl Work<O>) -> O {
    work.run()
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn inside_avx512<O>(work: impl Work<O>) -> O {
    work.run()
}

/// What lies in memory as numbers and nothing else.
///
/// # Safety
/// All bits are valid, and there is no padding.
unsafe trait Numbers: Copy {}

macro_rules! numbers {
    ($($type:ty),+) => { $(
        // SAFETY: of a number, or a vector of numbers, all bits are valid.
        unsafe impl Numbers for $type {}
    )+ };
}

numbers!(u8, u16, i32, u32, u64, f32, f64, __m128i, __m256, __m256i, __m256d, __m512, __m512i, __m512d);

// SAFETY: arrays have no padding.
unsafe impl<T: Numbers, const N: usize> Numbers for [T; N] {}

/// Vectors from an array of their size, wherever it lies.
#[inline(always)]
fn load<V: Numbers, A: Numbers>(from: &A) -> V {
    const { assert!(size_of::<V>() == size_of::<A>()) };
    // SAFETY: as many bytes as are read, of which all bits are valid.
    unsafe { std::ptr::from_ref(from).cast::<V>().read_unaligned() }
}

/// Vectors to an array of their size, wherever it lies.
#[inline(always)]
fn store<A: Numbers, V: Numbers>(to: &mut A, vectors: V) {
    const { assert!(size_of::<V>() == size_of::<A>()) };
    // SAFETY: as many bytes as are written, of which all bits are valid.
    unsafe { std::ptr::from_mut(to).cast::<V>().write_unaligned(vectors) }
}
