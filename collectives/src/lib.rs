//! Pure: collective schedules as data, generators, verifier, simulator.
//!
//! A [`Schedule`] says who sends which chunks to whom in which round. It is data: the same value is run by
//! the worker ([`Schedule::for_rank`]), proven by [`verify`] and timed by [`simulate`].
//!
//! Adding a schedule: a generator in `generate.rs` and its place in [`allreduce`] there; the verifier, its mutations and the
//! simulator's bounds then run over it for every N up to 64. A goal of a new kind is a variant of [`Goal`], and its
//! generators stand in `tests/common/mod.rs`.
//!
//! ```
//! use flexcomm_collectives::{Goal, ring_allreduce, simulate, verify};
//! use flexcomm_domain::{Link, LinkMatrix};
//!
//! let ring = ring_allreduce(8)?;
//! verify(&ring)?;
//! assert_eq!(ring.goal(), Goal::Allreduce);
//! let links = LinkMatrix::uniform(8, Link::new(1e-3, 1e9)?)?;
//! let bytes = 1e6;
//! let time = simulate(&ring, &|_chunk| bytes / 8.0, &links)?;
//! assert!((time.get() - (14.0 * 1e-3 + 1.75 * bytes * 8e-9)).abs() < 1e-9);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod generate;
mod schedule;
mod simulate;
mod verify;

pub use generate::{
    Allreduce, GenerateError, MAX_RANKS, allgather, allreduce, binomial_broadcast, doubling_allgather, ring_allgather,
    ring_allreduce, tree_allreduce,
};
pub use schedule::{Chunks, Goal, Move, Op, Round, Schedule, Transfer, chunk_range};
pub use simulate::{SimulateError, simulate, simulate_after};
pub use verify::{VerifyError, verify, verify_views};
