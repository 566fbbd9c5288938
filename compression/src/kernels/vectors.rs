//! Every loop that is written in a processor's own vectors (`x86/`), as a method of [`Kernel`] that is safe to call on
//! any machine: the list of what has vectors, and which.
//!
//! Results are those of the portable loops, bit for bit. Unless its comment says otherwise a method works on the first
//! values, as far as they fill its vectors, and answers how many these are: 0 where the kernel may not use such vectors
//! or the processor has none. The caller does the rest.
#![allow(unsafe_code)]

use super::compact::Compaction;
use super::nearest::{Even, Lines};
use super::partition::{Columns, PartitionSums};
use super::places::{Packed, Places};
use super::rounding::{Rounded, Rounding, Squares, Steps, TABLED};
use super::signs::{Decayed, Sums};
use super::tables::Table;
#[cfg(target_arch = "x86_64")]
use super::x86::{
    self, compact, halves, inside_avx2, inside_avx512, nearest, pack, partition, pass, rounding, signs, steps, tables,
    ternary, with_features_of,
};
use super::{Candidates, Feed, Kernel, PassStats, Work, portable};

/// Methods of [`Kernel`]. Each lists its functions, the fastest first, behind the level that they need: a function of
/// `x86` that says whether the kernel may use such vectors and the processor has them. The first whose level is there
/// runs; without one, what `_` says, or the default answer.
macro_rules! vectors {
    ($(
        $(#[$doc:meta])*
        fn $name:ident $([$($generic:tt)+])? ($($arguments:tt)+) -> $answer:ty { $($functions:tt)+ }
    )+) => {
        impl Kernel { $( vectors! {
            @method ($($arguments)+) [$($($generic)+)?]
            $(#[$doc])* fn $name [$($($generic)+)?] ($($arguments)+) -> $answer { $($functions)+ }
        } )+ }
    };
    (@method $all:tt $generics:tt
        $(#[$doc:meta])*
        fn $name:ident [$($generic:tt)*] ($($argument:ident: $type:ty),+) -> $answer:ty {
            $($level:ident => $function:expr),+ $(, _ => $otherwise:expr)?
        }
    ) => {
        $(#[$doc])*
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
        pub(crate) fn $name<$($generic)*>(self, $($argument: $type),+) -> $answer {
            $(
                #[cfg(target_arch = "x86_64")]
                if x86::$level(self) {
                    with_features_of!($level, $generics $all -> $answer { $function });
                    // SAFETY: the processor has all that the level stands for; the function needs no more, which the compiler
                    // has checked above.
                    return unsafe { vectors!(@call $function, $all) };
                }
            )+
            vectors!(@otherwise $($otherwise)?)
        }
    };
    (@call $function:expr, ($($argument:ident: $type:ty),+)) => { $function($($argument),+) };
    (@otherwise) => { Default::default() };
    (@otherwise $otherwise:expr) => { $otherwise };
}

vectors! {
    /// Runs a loop of plain Rust, compiled for the kernel's vectors.
    #[inline(always)]
    fn run[O](work: impl Work<O>) -> O { avx512 => inside_avx512, avx2 => inside_avx2, _ => work.run() }

    /// The pass over a gradient, all of it.
    fn feed(feed: Feed<'_>, found: &mut Candidates) -> PassStats {
        avx512 => pass::avx512, avx2 => pass::avx2, _ => portable::feed(feed, found)
    }

    /// [`super::stats`] of parts of `len` values that follow one another, a multiple of 16 and no more than a block;
    /// answers whether it took them.
    fn parts(x: &[f32], len: usize, seen: &mut [PassStats]) -> bool { avx512 => pass::parts }

    /// Squares and the largest key.
    fn approximate_first(x: &[f32], squares: &mut Squares) -> (usize, u32) { avx512 => rounding::approximate }

    fn compact_first(found: (&[u32], &[u32]), to: &mut Compaction<'_>) -> usize { avx512 => compact::compact }

    /// [`Kernel::signs`], of a multiple of 8.
    fn signs_first[const MAGNITUDES: bool](x: &[f32], bits: &mut [u8], sums: &mut Sums) -> usize {
        avx512 => signs::avx512::<MAGNITUDES>, avx2 => signs::avx2
    }

    /// [`Kernel::decayed_signs`], of whole blocks.
    fn decayed_signs_first(decayed: Decayed<'_>, seen: &mut PassStats) -> usize { avx512 => signs::decayed_avx512 }

    fn add_sides_first[const FRESH: bool](bits: &[u8], values: [f32; 2], out: &mut [f32]) -> usize {
        avx512 => signs::add_avx512::<FRESH>
    }

    fn partition_first(x: &[f32], threshold: f32, bits: &mut [u8], partition: &mut PartitionSums) -> usize {
        avx512 => partition::partition
    }

    /// Of the first columns.
    fn partition_first_columns(x: &[f32], threshold: f32, columns: &mut Columns) -> usize {
        avx512 => partition::partition_columns
    }

    /// Of all columns; answers whether it did.
    fn add_all_columns[const FRESH: bool](bits: &[u8], values: [&[f32]; 2], out: &mut [f32]) -> bool {
        avx512 => partition::add_columns::<FRESH>
    }

    fn narrow_first[const F16: bool](
        x: (&[f32], f32),
        to: &mut [[u8; 2]],
        squares: (&mut Squares, &mut Squares)
    ) -> usize { avx512 => halves::narrow::<F16> }

    /// Answers the largest key of what was added, too.
    fn widen_first[const FRESH: bool, const F16: bool](from: &[[u8; 2]], target: (f32, &mut [f32])) -> (usize, u32) {
        avx512 => halves::widen::<FRESH, F16>
    }

    /// Codes of the first values; answers of how many, a multiple of 64, and their squares in steps where these are
    /// whole numbers. Others are added to `squares`. None where this kernel has no such vectors, or none for this width.
    fn round(rounding: Rounding, values: Rounded<'_>, squares: &mut Squares) -> (usize, Option<u64>) {
        avx512_bytes => rounding::round_by_bytes, avx512 => rounding::round, avx2 => steps::round
    }

    /// Codes of values whose steps are others every `len` of them, a multiple of 64, and the squares of each part in
    /// steps; answers of how many values: of all, or of none where this kernel has no such vectors, or none for this
    /// width. `steps` is (steps, len).
    fn round_parts(steps: (&[Steps], usize), values: Rounded<'_>, squares: &mut [u64]) -> usize {
        avx512_bytes => rounding::to_steps
    }

    /// Natural compression (`natural.rs`) of the first values: exponents into [`Rounded::codes`], signs, and squares of
    /// what they stand for times a scale, with `squares` = (scale, squares); answers of how many, a multiple of 64.
    fn round_to_powers(values: Rounded<'_>, signs: &mut [u8], squares: (f32, &mut Squares)) -> usize {
        avx512 => rounding::to_powers
    }

    /// `out += scale * ±2^(exponent − 127)` of the first values, with `target` = (scale, out); answers how many, a
    /// multiple of 8.
    fn add_powers(exponents: &[u8], signs: &[u8], target: (f32, &mut [f32])) -> usize { avx512 => rounding::add_powers }

    /// `out += values[code]`, where it is FRESH to zeros, of the first codes, all below [`TABLED`]; answers of how many.
    fn add_codes[const FRESH: bool](codes: &[u8], values: &[f32; TABLED], out: &mut [f32]) -> usize {
        avx512 => rounding::add_codes::<FRESH>
    }

    fn add_first_meanings[const FRESH: bool](codes: &[u8], table: &Table, out: &mut [f32]) -> usize {
        avx512_bytes => tables::add::<FRESH>
    }

    fn sum_of_first_meanings(codes: &[u8], table: &Table, sums: &mut Squares) -> usize { avx512_bytes => tables::sum }

    /// Codes of the first values; answers of how many. `exact` decides where there is doubt.
    fn even_codes(even: Even, x: &[f32], codes: &mut [u8], exact: impl Fn(f32) -> u8) -> usize {
        avx512 => nearest::even_codes
    }

    /// As [`Self::even_codes`].
    fn line_codes(lines: &Lines, x: &[f32], codes: &mut [u8], exact: impl Fn(f32) -> u8) -> usize {
        avx512 => nearest::line_codes
    }

    /// Bytes, and how many values are not 0.
    fn quartic_first(x: &[f32], half: f32, to: (&mut [u8], &mut [u64])) -> (usize, u64) { avx512 => ternary::quartic }

    /// Packs codes below 2^width, a multiple of 64.
    fn pack_first(codes: &[u8], width: u32, out: &mut [u8]) -> usize { avx512_bytes => pack::pack }

    /// Unpacks codes, a multiple of 64; answers the largest, too.
    fn unpack_first(packed: &[u8], width: u32, codes: &mut [u8]) -> (usize, u8) { avx512_bytes => pack::unpack }

    /// Answers of how many codes, a multiple of 64, and how many places.
    fn places_first(packed: Packed<'_>, to: &mut Places) -> (usize, usize) { avx512_bytes => pack::places }
}
