//! Who decides in a run that adapts: flexcomm, as it is shipped, or one of the controls.

use crate::adaptive::{self, AdaptiveRun, RunUntil, TimedOrder};
use crate::agents::Agents;
use crate::cells::Cell;
use crate::fixed::DENSE;
use crate::ranks::Data;
use anyhow::{Context, Result};
use flexcomm_controller::RawConfig;
use flexcomm_truth::coefficients::Coefficients;
use std::sync::Arc;

/// Who decides in a run that adapts.
#[derive(Debug, Clone, PartialEq)]
pub enum Decider {
    /// Agents and controller, as they are shipped.
    Flexcomm,
    /// Who knows the best fixed setting of each phase.
    Oracle(Vec<TimedOrder>),
    /// Any fixed setting at each change.
    Random(Vec<TimedOrder>),
}

impl Decider {
    /// As progress and failures call it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Flexcomm => "flexcomm",
            Self::Oracle(_) => "oracle",
            Self::Random(_) => "random",
        }
    }
}

/// A run that adapts.
#[derive(Debug, Clone, PartialEq)]
pub struct Wanted {
    /// Its seed.
    pub seed: u64,
    /// How far it is of use.
    pub goal: RunUntil,
    /// Who decides.
    pub who: Decider,
}

/// Runs a cell under whoever decides. A job begins dense.
pub fn decided(cell: &Cell, truth: &Coefficients, data: Arc<Data>, wanted: Wanted) -> Result<AdaptiveRun> {
    let Wanted { seed, goal, who } = wanted;
    match who {
        Decider::Flexcomm => Ok(flexcomm(cell, truth, &data, seed, goal)?.0),
        Decider::Oracle(script) | Decider::Random(script) => {
            adaptive::run(cell, truth, &data, seed, DENSE.parse()?, &mut adaptive::Script::new(script), goal)
        }
    }
}

/// A run under the shipped controller and agents, which are as they were at its end.
pub fn flexcomm(
    cell: &Cell,
    truth: &Coefficients,
    data: &Arc<Data>,
    seed: u64,
    goal: RunUntil,
) -> Result<(AdaptiveRun, Agents)> {
    let config = RawConfig::default().validate().context("use the controller's defaults")?;
    let mut agents = Agents::new(cell, truth, config)?;
    let mut ran = adaptive::run(cell, truth, data, seed, DENSE.parse()?, &mut agents, goal)?;
    ran.problems.extend(agents.problems());
    Ok((ran, agents))
}
