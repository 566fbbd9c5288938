//! Counts allocations of this thread, and that hostile bytes cause no large ones.

use crate::harness::{Run, every_strategy, laplace, shape};
use flexcomm_compression::Build;
use flexcomm_compression::codec::Target;
use flexcomm_compression::wire::Reader;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn count(bytes: usize) {
    // During a thread's end the cells may be gone; nothing is measured there.
    let _ = COUNT.try_with(|c| c.set(c.get() + 1));
    let _ = LARGEST.try_with(|c| c.set(c.get().max(bytes)));
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How many allocations `work` makes on this thread.
pub(crate) fn allocations(work: impl FnOnce()) -> u64 {
    let before = COUNT.with(Cell::get);
    work();
    COUNT.with(Cell::get) - before
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1u8; 100]))), 1);
}

/// The largest allocation that `work` makes on this thread, in bytes.
fn largest(work: impl FnOnce()) -> usize {
    LARGEST.with(|c| c.set(0));
    work();
    LARGEST.with(Cell::get)
}

/// Whatever number stands where a payload may claim one, a decoder takes no more room than its tensor calls for.
#[test]
fn claims_allocate_nothing() {
    assert!(largest(|| drop(std::hint::black_box(vec![1u8; 12_345]))) >= 12_345);
    let n = 200;
    for strategy in every_strategy() {
        let mut run = Run::new(&strategy, shape(n), 3);
        run.transmit(&laplace(n, 7)).unwrap();
        let good = run.payload.bytes().to_vec();
        for at in 0..good.len().min(64) {
            for claim in [0x7fff_ffffu32, 0xffff_ffff, 0x0100_0000, 1 + n as u32] {
                let mut bytes = good.clone();
                let end = good.len().min(at + 4);
                bytes[at..end].copy_from_slice(&claim.to_le_bytes()[..end - at]);
                let mut codec = strategy.codec(shape(n));
                let mut out = vec![0.0; n];
                let most = largest(|| {
                    // Refused or read, as the claim may even be true.
                    let _ = codec.decode(&mut Reader::new(&bytes), &run.context, Target::add(1.0, &mut out));
                });
                assert!(most <= 32 * n, "{strategy}: {claim:#x} at {at} allocates {most} bytes");
            }
        }
    }
}
