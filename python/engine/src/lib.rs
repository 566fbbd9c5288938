//! What a rank does with its gradient buckets, without Python and without IO of its own.
//!
//! A [`Store`] holds one [`Bucket`] per DDP bucket: parameters, error feedback, and the state of the exchange under
//! way. An exchange is a transaction: what was held back changes only once all ranks are known to have done their
//! part, so a NaN on one rank leaves every rank's memory as it was. Residuals belong to parameters: when DDP
//! rebuilds its buckets they move along.

mod auto;
mod bucket;
mod error;
mod late;
mod piped;
mod shadow;
mod store;

pub use auto::{AutoSelection, Leader};
pub use bucket::{Answers, Bucket, Exchange, Home, INDEX_HEAD, OnHost, Param, Ran, chooses, energies, kernels};
pub use error::EngineError;
pub use late::Late;
pub use piped::{How, Piped, Turn, layers};
pub use shadow::{Shadow, ShadowGain};
pub use store::{PipeState, Saved, Shared, Store, lock};
