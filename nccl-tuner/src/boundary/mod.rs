//! Where C begins: the tables of functions that NCCL looks up, the functions of the process that trains, NCCL's logger.
//! The only unsafe code of this crate.
//!
//! Nothing that goes wrong here may end the training process: every function answers success, whatever it met, and no
//! panic leaves it. NCCL hands a tuner's error on to the collective's caller, so an error code would end the job too.
#![allow(unsafe_code)]

pub mod control;
pub mod layout;
mod log;
mod tuner;

pub use log::Logger;

use crate::communicators::Registry;

/// All communicators of this process.
static REGISTRY: Registry<Logger> = Registry::new();

/// Runs what C called; a panic ends here, and the standard hook has printed it.
fn shielded<T>(on_panic: T, body: impl FnOnce() -> T) -> T {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(on_panic)
}

#[cfg(test)]
mod tests {
    use super::shielded;

    #[test]
    fn a_panic_ends_at_the_boundary() {
        assert_eq!(shielded(7, || 8), 8);
        assert_eq!(shielded(7, || panic!("as a bug would")), 7);
    }
}
