//! Launches: how many blocks, and arguments as the words that kernels take.

use crate::device::MOST_ARGUMENTS;
use crate::workspace::MOST_BLOCKS;
use crate::{Device, LaunchError, Span, THREADS};

/// Arguments of a launch, in the kernel's order.
#[derive(Default)]
pub(crate) struct Arguments {
    words: [u64; MOST_ARGUMENTS],
    count: usize,
}

/// One argument, or any number in a row: options, arrays and tuples of them.
pub(crate) trait Words {
    fn put(self, to: &mut Arguments);
}

impl Words for u64 {
    fn put(self, to: &mut Arguments) {
        to.words[to.count] = self;
        to.count += 1;
    }
}

macro_rules! one_word {
    ($($kind:ty: $word:expr),+) => {
        $(impl Words for $kind {
            fn put(self, to: &mut Arguments) {
                u64::from($word(self)).put(to);
            }
        })+
    };
}
one_word!(u32: u64::from, bool: u64::from, f32: f32::to_bits, f64: f64::to_bits, Span: Span::address);

impl<T: Words> Words for Option<T> {
    fn put(self, to: &mut Arguments) {
        self.into_iter().for_each(|part| part.put(to));
    }
}

impl<T: Words, const N: usize> Words for [T; N] {
    fn put(self, to: &mut Arguments) {
        self.into_iter().for_each(|part| part.put(to));
    }
}

/// Of this many parts and fewer.
macro_rules! tuples {
    () => {
        impl Words for () {
            fn put(self, _: &mut Arguments) {}
        }
    };
    ($first:ident $($part:ident)*) => {
        impl<$first: Words, $($part: Words),*> Words for ($first, $($part,)*) {
            #[expect(non_snake_case)]
            fn put(self, to: &mut Arguments) {
                let ($first, $($part,)*) = self;
                $first.put(to);
                $($part.put(to);)*
            }
        }
        tuples!($($part)*);
    };
}
tuples!(A B C D E F G H I J K L);

/// Launches a kernel with so many blocks.
pub(crate) fn launch(
    device: &impl Device,
    kernel: &'static str,
    blocks: u32,
    arguments: impl Words,
) -> Result<(), LaunchError> {
    let mut all = Arguments::default();
    arguments.put(&mut all);
    device.launch(kernel, blocks, &all.words[..all.count])
}

/// With blocks for so many threads' worth of work: no more than run at the same time, and no idle ones.
pub(crate) fn start(
    device: &impl Device,
    kernel: &'static str,
    threads: u64,
    arguments: impl Words,
) -> Result<(), LaunchError> {
    let most = u64::from(device.blocks(kernel).clamp(1, MOST_BLOCKS));
    let blocks = threads.div_ceil(u64::from(THREADS)).clamp(1, most);
    launch(device, kernel, blocks as u32, arguments)
}
