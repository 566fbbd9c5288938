//! Gradient compressors with error feedback and their byte formats. No IO.
//!
//! Every compressor of the literature goes through one interface ([`codec`]), named by a text ([`CompressorSpec`](flexcomm_domain::spec::CompressorSpec)), with memory
//! and momentum around it ([`memory`], [`momentum`]) in a [`pipeline`]:
//!
//! ```
//! use flexcomm_compression::Layers;
//! use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
//! use flexcomm_compression::wire::Writer;
//!
//! let strategy = "topk(k=2)+ef(vanilla)".parse()?;
//! let mut rank = Pipeline::new(&strategy, Layers::new(&[3, 5])?, Member::alone(1));
//! let gradient = [0.0, 3.0, 0.5, 0.0, -4.0, 0.0, 0.25, 0.0];
//! let mut message = Writer::new();
//! let outcome = rank.compress(Gradient::F32(&gradient), Step { index: 0, learning_rate: 0.1 }, &mut message)?;
//! assert!(outcome.energy.gain() > 0.98 && !outcome.more);
//! let mut mean = [0.0; 8];
//! rank.aggregate(&[message.bytes()], 0, &mut mean)?;
//! assert_eq!(mean, [0.0, 3.0, 0.0, 0.0, -4.0, 0.0, 0.0, 0.0]);
//! assert_eq!(rank.residual()[2], 0.5);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `docs/adding.md` says how to add one.

pub mod codec;
pub mod entry;
pub mod memory;
pub mod methods;
pub mod momentum;
pub mod pipeline;
pub mod random;
pub mod tensor;
pub mod wire;

mod build;
mod kernels;
mod layers;
mod select;
mod selection;
mod sizes;

pub use build::Build;
pub use flexcomm_domain::Energy;
pub use flexcomm_domain::spec::{Checksum, MAX_VALUES};
pub use kernels::Kernel;
pub use layers::{Layers, LayersError};
pub use select::naive;
pub use selection::Selection;
pub use sizes::Sizes;
