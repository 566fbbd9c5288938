//! The regret suite: real training under a virtual clock, on networks that change, to tell whether a decision is a good one.
//!
//! What a fixed setting learns does not depend on the network: [`fixed`] trains each once ([`ranks`], with the gradients of
//! [`model`]) and plays its curve through the network of any cell ([`cells`], drawn by [`families`]), whose transfers [`steps`] hands
//! to `flexcomm_truth`. Runs that adapt train anew ([`adaptive`]) under flexcomm or a
//! control ([`decider`]), by the ranks' own agreement, trials and telemetry ([`trainers`]).
//!
//! [`run`] does both for all cells, with curves that are this program's ([`spot`]), and keeps a file for each ([`files`]) as long as it
//! is of the same cell, truth and program ([`digests`]). [`score`] makes seconds to a target and ratios of them, `ratios` compares
//! cells, [`reaction`] makes times from changes to better strategies, [`summary`] and [`plot`] show all of it, as [`report`] writes
//! it. [`mod@record`] keeps results as baselines, [`reality`] compares with an experiment, [`calibrate`] fits the truth to a machine.

pub mod adaptive;
pub mod agents;
pub mod baselines;
pub mod calibrate;
pub mod cells;
mod chart;
pub mod decider;
pub mod digests;
pub mod families;
pub mod files;
pub mod fixed;
pub mod model;
pub mod plot;
pub mod ranks;
mod ratios;
pub mod reaction;
pub mod reality;
pub mod record;
pub mod report;
pub mod run;
pub mod score;
pub mod spot;
pub mod steps;
pub mod summary;
mod table;
pub mod trainers;
