//! The regret suite: real training under a virtual clock, on networks that change, to tell whether a decision is a good one.
//!
//! What a fixed setting learns does not depend on the network: [`fixed`] trains each once ([`ranks`], with the gradients of
//! [`model`]) and plays its curve through the network of any cell ([`cells`], drawn by [`families`]), whose transfers [`steps`] hands
//! to `flexcomm_truth`. [`score`] makes seconds to a target and ratios of them. Runs that adapt are not built yet.

pub mod cells;
pub mod families;
pub mod fixed;
pub mod model;
pub mod ranks;
pub mod score;
pub mod steps;
