//! Gradient compressors with error feedback and their byte formats. No IO.
//!
//! One [`GradientCompressor`] per rank holds the memory (what was not sent yet) and all buffers:
//!
//! ```
//! use flexcomm_compression::{Checksum, Compressor, GradientCompressor, Layers, Message, Method, Part, aggregate, encode};
//! use flexcomm_domain::CompressionRatio;
//!
//! let mut rank = GradientCompressor::new(Layers::new(&[3, 5])?);
//! let method = Method::new(Compressor::TopK, CompressionRatio::new(0.25)?);
//! let sent = rank.compress(method, &[0.0, 3.0, 0.5, 0.0, -4.0, 0.0, 0.25, 0.0], 1)?;
//! assert_eq!(sent.selection.indices(), [1, 4]);
//! let mut bytes = Vec::new();
//! encode(Compressor::TopK, sent.selection, Part::Whole, Checksum::None, &mut bytes);
//!
//! let message = Message::parse(&bytes)?;
//! let mut mean = vec![0.0; 8];
//! aggregate(&[message], 1, &mut mean)?;
//! assert_eq!(mean, [0.0, 3.0, 0.0, 0.0, -4.0, 0.0, 0.0, 0.0]);
//! assert_eq!(rank.residual()[2], 0.5);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! By collective:
//! - allgather: [`GradientCompressor::compress`], [`encode`], exchange, [`Message::parse`], [`aggregate`].
//! - AR-Topk: the chosen rank calls [`GradientCompressor::select`] and broadcasts [`Part::Indices`], the others call
//!   [`GradientCompressor::feed`] (all call `select` when the energy of the selection decides who is chosen);
//!   then everybody calls [`GradientCompressor::take_at`], sums the values and [`scatter_mean`]s them.
//! - dense: [`GradientCompressor::take_all`], sum.
//!
//! What a change of method does to the memory: nothing. The residual belongs to the gradient, not to the compressor:
//! a change of CR or compressor keeps it, going dense sends gradient + residual and leaves it zero.
//!
//! A buffer set takes 8 bytes per value (residual and error-fed gradient), plus what a step selects and finds.
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
//! assert_eq!(rank.held_back()[2], 0.5);
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

mod aggregate;
mod build;
mod compressor;
mod feedback;
mod format;
mod kernels;
mod layers;
mod select;
mod selection;
mod shadow;
mod sizes;

pub use aggregate::{AggregateError, aggregate, scatter_mean};
pub use build::Build;
pub use compressor::{Compressed, Compressor, GradientCompressor, Method};
pub use feedback::{CompressError, Memory};
pub use flexcomm_domain::spec::{Checksum, MAX_VALUES};
pub use format::{
    DecodeError, HEADER_BYTES, INDEX_BYTES, Message, Part, VALUE_BYTES, VERSION, dense_bytes, encode, encode_dense,
    message_bytes,
};
pub use kernels::Kernel;
pub use layers::{Layers, LayersError};
pub use select::naive;
pub use selection::{Energy, Selection, SelectionError};
pub use shadow::{MAX_SHADOWS, SHADOW_VALUES, Shadow, ShadowGain};
pub use sizes::Sizes;
