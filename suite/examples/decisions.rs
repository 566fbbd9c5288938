//! What flexcomm decides in a cell, with what it predicts of the alternatives.
//!
//! `cargo run --release -p flexcomm-suite --example decisions -- CELL [SEED [SECONDS]]` prints a JSON object per decision of the first
//! so many seconds of the run, by the cell's own clock; without, of the whole run.
#![allow(clippy::print_stdout)]

use anyhow::{Context, Result};
use flexcomm_lab::worker::DEFAULT_FOLDER;
use flexcomm_suite::adaptive::RunUntil;
use flexcomm_suite::cells::Cell;
use flexcomm_suite::decider;
use flexcomm_suite::fixed::Shared;
use serde_json::json;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let name = args.next().context("name a cell")?;
    let seed: u64 = args.next().map_or(Ok(1), |seed| seed.parse())?;
    let late_s = args.next().map_or(Ok(f64::INFINITY), |seconds| seconds.parse())?;
    let cell = Cell::read_all("suite/cells".as_ref())?.into_iter().find(|cell| cell.name == name);
    let cell = cell.with_context(|| format!("there is no cell {name}"))?;
    let truth = flexcomm_truth::coefficients::Coefficients::frozen();
    let data = Shared::new(DEFAULT_FOLDER.into()).of(cell.world)?;
    let (_, agents) =
        decider::flexcomm(&cell, &truth, &data, seed, RunUntil { late_s, is_whole: false, ..RunUntil::WHOLE })?;
    let job = "suite".parse()?;
    for made in agents.controller().decisions(&job).map_err(anyhow::Error::msg)? {
        let report: serde_json::Value = serde_json::from_str(&made.report)?;
        let (at, strategy) = (made.at.as_secs_f64(), made.plan.to_string());
        println!("{}", json!({"at": at, "strategy": strategy, "reason": made.reason, "report": report}));
    }
    Ok(())
}
