//! After the first step with a method nothing is allocated: counted by the allocator itself.
#![allow(clippy::unwrap_used, unsafe_code)] // a counting allocator cannot be written without unsafe

use flexcomm_compression::Compressor;
use flexcomm_compression::{
    Checksum, GradientCompressor, Kernel, Layers, Memory, Message, Method, Part, aggregate, encode,
};
use flexcomm_domain::CompressionRatio;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // During a thread's end the cell may be gone; nothing is measured there.
    let _ = COUNT.try_with(|c| c.set(c.get() + 1));
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> u64 {
    let before = COUNT.with(Cell::get);
    work();
    COUNT.with(Cell::get) - before
}

/// One step with everything that belongs to it.
struct Rank {
    compressor: GradientCompressor,
    bytes: Vec<u8>,
    indices: Vec<u32>,
    values: Vec<f32>,
    mean: Vec<f32>,
    memory: Memory,
}

impl Rank {
    fn step(&mut self, method: Method, gradient: &[f32], seed: u64) {
        let sent = self.compressor.compress(method, gradient, seed).unwrap();
        encode(method.compressor, sent.selection, Part::Whole, Checksum::Crc32c, &mut self.bytes);
        let message = Message::parse(&self.bytes).unwrap();
        message.indices_into(&mut self.indices);
        aggregate(&[message], 1, &mut self.mean).unwrap();
        self.compressor.select(method, gradient, seed).unwrap();
        self.compressor.take_at(&self.indices, &mut self.values).unwrap();
        self.compressor.save_into(&mut self.memory);
        self.compressor.restore(&self.memory).unwrap();
    }
}

#[test]
fn steps_after_the_first_allocate_nothing() {
    // The counter itself works.
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1u8; 100]))), 1);
    let n = 100_000;
    let gradients: Vec<Vec<f32>> = (1..9)
        .map(|s| (0..n).map(|i| ((i * s) as f32 * 0.37).sin().powi(5) + if s == 8 { 0.0 } else { 1e-3 }).collect())
        .chain([vec![0.0; n], vec![2.5; n], (0..n).map(|i| (i % 3) as f32).collect()])
        .collect();
    for kernel in Kernel::available() {
        for compressor in [Compressor::TopK, Compressor::LwTopK, Compressor::MsTopK] {
            for cr in [0.1, 0.01, 0.001] {
                let layers = Layers::new(&[10, 1500, 30_000, n - 31_510]).unwrap();
                let mut rank = Rank {
                    compressor: GradientCompressor::with_kernel(layers, kernel),
                    bytes: Vec::new(),
                    indices: Vec::new(),
                    values: Vec::new(),
                    mean: vec![0.0; n],
                    memory: Memory::default(),
                };
                let method = Method::new(compressor, CompressionRatio::new(cr).unwrap());
                rank.step(method, &gradients[0], 0);
                for (i, gradient) in gradients.iter().enumerate() {
                    let count = allocations(|| rank.step(method, gradient, i as u64));
                    assert_eq!(count, 0, "{method:?} on {kernel:?}, gradient {i}");
                }
            }
        }
    }
}
