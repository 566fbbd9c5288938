//! A scenario is a file: job, topology, network trace, what goes wrong, and what is expected of it.

use crate::model::Model;
use crate::run::{Breakage, Faults, Probes, Run, Setup, fixed, oracle};
use crate::schedule::{RawSchedule, Schedule, ScheduleError, c1, c2};
use crate::world::{Noise, Oddity, World};
use flexcomm_domain::{Collective, Family, Plan, Strategy};
use flexcomm_planner::{Config, ConfigError, Offer};
use serde::Deserialize;

/// Most ranks of a simulated job: the links' matrix and the ring's critical path are computed every second.
const MAX_RANKS: usize = 64;

/// A scenario, checked.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Its name.
    pub name: String,
    /// Each is one run.
    pub seeds: Vec<u64>,
    /// What to play.
    pub setup: Setup,
    /// What must come of it.
    pub expect: Expect,
}

/// Why a scenario was refused. Completes "failed to read the scenario: ...".
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// Not TOML, an unknown key, or a value of the wrong type; the text names line and key.
    #[error("{0}")]
    Toml(String),
    /// The network trace.
    #[error("network: {0}")]
    Trace(#[from] ScheduleError),
    /// The planner's settings.
    #[error(transparent)]
    Planner(#[from] ConfigError),
    /// A value out of range.
    #[error("{key} is {value}, allowed is {allowed}")]
    Value {
        /// Which key.
        key: &'static str,
        /// As given.
        value: String,
        /// What would be accepted.
        allowed: String,
    },
}

/// What must come of a run.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Expect {
    /// At least this many changes, the first decision included.
    pub least_changes: usize,
    /// At most this many.
    pub most_changes: Option<usize>,
    /// Time over that of the truly best candidate of every epoch, trials and late news included: at most this.
    pub of_oracle: Option<f64>,
    /// Time over that of the best single strategy: at most this.
    pub of_best_fixed: Option<f64>,
    /// What is in force at the end of an epoch.
    pub at: Vec<ExpectAt>,
}

/// What is in force at the end of an epoch; what is absent is not looked at.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExpectAt {
    /// Which epoch, as the schedule counts.
    pub epoch: u32,
    /// One of these.
    pub collectives: Option<Vec<Collective>>,
    /// CR at most.
    pub cr_at_most: Option<f64>,
    /// CR at least.
    pub cr_at_least: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    name: String,
    /// For people.
    #[serde(default)]
    #[allow(dead_code)]
    about: String,
    seeds: Vec<u64>,
    job: RawJob,
    #[serde(alias = "weather")]
    network: RawTrace,
    #[serde(default)]
    noise: Noise,
    #[serde(default)]
    odd_rank: Vec<Oddity>,
    #[serde(default)]
    probes: Probes,
    #[serde(default, rename = "break")]
    breakage: Vec<Breakage>,
    #[serde(default)]
    faults: Faults,
    #[serde(default)]
    planner: Config,
    expect: Expect,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawJob {
    model: String,
    ranks: usize,
    steps_per_epoch: Option<f64>,
    compressors: Option<Vec<Family>>,
    collectives: Option<Vec<Collective>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTrace {
    /// `c1` or `c2`; else `custom`.
    schedule: Option<String>,
    custom: Option<RawSchedule>,
    rate_divisor: Option<f64>,
    epochs: Option<u32>,
}

impl Scenario {
    /// Reads and checks a scenario.
    pub fn from_toml(text: &str) -> Result<Self, ScenarioError> {
        let raw: Raw = toml::from_str(text).map_err(|e| ScenarioError::Toml(explained(e.to_string())))?;
        raw.check()
    }

    /// What of the expectations does not hold; empty: all holds.
    pub fn failures(&self, run: &Run) -> Vec<String> {
        let mut found = run.violations.iter().take(5).map(|v| format!("violation: {v}")).collect::<Vec<_>>();
        let mut expect = |holds: bool, what: String| {
            if !holds {
                found.push(what);
            }
        };
        let e = &self.expect;
        let changes = run.made.len();
        expect(!run.stuck, "the job made no progress".into());
        expect(changes >= e.least_changes, format!("{changes} changes, at least {} expected", e.least_changes));
        expect(e.most_changes.is_none_or(|m| changes <= m), format!("{changes} changes, at most {:?}", e.most_changes));
        let (of_oracle, of_fixed) = (run.time_s / self.oracle_s(), run.time_s / self.best_fixed().1);
        expect(e.of_oracle.is_none_or(|m| of_oracle <= m), format!("{of_oracle:.3} of the oracle's time"));
        expect(e.of_best_fixed.is_none_or(|m| of_fixed <= m), format!("{of_fixed:.3} of the best fixed one's time"));
        for at in &e.at {
            match run.at_epoch_end.get(&at.epoch) {
                Some(plan) => {
                    expect(at.fits(plan), format!("{plan} at the end of epoch {}, expected {at:?}", at.epoch))
                }
                None => expect(false, format!("epoch {} was not played", at.epoch)),
            }
        }
        found
    }

    /// The candidates of the simulated job.
    pub fn candidates(&self) -> Vec<Strategy> {
        let job = flexcomm_domain::JobId::new("sim").ok();
        let snapshot = job.map(|job| {
            let mut s = flexcomm_planner::Snapshot::new(job, 2, 1);
            (s.offer, s.config) = (self.setup.offer.clone(), self.setup.config.clone());
            s
        });
        snapshot.map_or_else(Vec::new, |s| s.space().strategies())
    }

    /// The best single strategy and its time in seconds.
    pub fn best_fixed(&self) -> (Strategy, f64) {
        let timed = self.candidates().into_iter().map(|s| (s, fixed(&self.setup, &s)));
        let dense = (Strategy::DENSE_RING, f64::INFINITY);
        timed.fold(dense, |best, one| if one.1 < best.1 { one } else { best })
    }

    /// Seconds with the truly best candidate in every epoch.
    pub fn oracle_s(&self) -> f64 {
        oracle(&self.setup, &self.candidates())
    }
}

impl ExpectAt {
    fn fits(&self, plan: &Plan) -> bool {
        let fits = |s: &Strategy| {
            self.collectives.as_ref().is_none_or(|c| c.contains(&s.collective()))
                && self.cr_at_most.is_none_or(|c| s.cr().get() <= c)
                && self.cr_at_least.is_none_or(|c| s.cr().get() >= c)
        };
        plan.strategies().iter().all(fits)
    }
}

/// A key of the planner that earlier builds had is named with what takes its place.
fn explained(error: String) -> String {
    let key = error.split_once("unknown field `").and_then(|(_, rest)| rest.split_once('`')).map(|(key, _)| key);
    match key.and_then(Config::replacement) {
        Some(replacement) => format!("{error}\nIn its place: {replacement}"),
        None => error,
    }
}

fn within(key: &'static str, value: f64, least: f64, most: f64) -> Result<(), ScenarioError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(ScenarioError::Value { key, value: value.to_string(), allowed: format!("{least} to {most}") })
}

impl Raw {
    fn check(self) -> Result<Scenario, ScenarioError> {
        self.check_numbers()?;
        self.planner.check()?;
        let mut model = Model::paper(&self.job.model).ok_or_else(|| ScenarioError::Value {
            key: "job.model",
            value: self.job.model.clone(),
            allowed: Model::PAPERS.join(", "),
        })?;
        if let Some(steps) = self.job.steps_per_epoch {
            within("job.steps_per_epoch", steps, 1.0, 1e6)?;
            model.steps_per_epoch = steps;
        }
        let compressors =
            self.job.compressors.unwrap_or_else(|| vec!["topk".parse().expect("it is in the table of names")]);
        if let Some(other) = compressors.iter().find(|family| !Model::COMPRESSORS.contains(&family.name())) {
            let allowed = format!("{}, whose gains the simulated job knows", Model::COMPRESSORS.join(", "));
            return Err(ScenarioError::Value { key: "job.compressors", value: other.to_string(), allowed });
        }
        // By default those whose true times the simulated job knows: what a scenario expects is of them.
        let known = || model.hidden.keys().copied().collect();
        let offer = Offer {
            codecs: compressors.into_iter().map(|c| (c, World::codec())).collect(),
            collectives: self.job.collectives.unwrap_or_else(known),
            ..Offer::default()
        };
        // Delay costs what the planner assumes.
        let delay = self.planner.policy.time_to_quality().delay();
        let (ranks, oddities, noise) = (self.job.ranks, self.odd_rank, self.noise);
        let setup = Setup {
            world: World { model, ranks, oddities, noise, delay },
            schedule: self.network.check()?,
            config: self.planner,
            offer,
            probes: self.probes,
            faults: self.faults,
            breakages: self.breakage,
            most_looks: None,
        };
        Ok(Scenario { name: self.name, seeds: self.seeds, setup, expect: self.expect })
    }

    fn check_numbers(&self) -> Result<(), ScenarioError> {
        within("job.ranks", self.job.ranks as f64, 1.0, MAX_RANKS as f64)?;
        for odd in &self.odd_rank {
            within("odd_rank.rank", odd.rank as f64, 0.0, self.job.ranks as f64 - 1.0)?;
            within("odd_rank.latency_factor", odd.latency_factor, 0.001, 1000.0)?;
            within("odd_rank.bandwidth_factor", odd.bandwidth_factor, 0.001, 1000.0)?;
        }
        for breakage in &self.breakage {
            within("break.factor", breakage.factor, 0.01, 1000.0)?;
        }
        within("noise.links", self.noise.links, 0.0, 0.9)?;
        within("noise.gain", self.noise.gain, 0.0, 0.9)?;
        within("noise.times", self.noise.times, 0.0, 0.9)?;
        within("noise.fresh", self.noise.fresh, 0.0, 0.9)?;
        within("probes.lag_s", self.probes.lag_s, 0.0, 3600.0)?;
        within("probes.lower_bounds", self.probes.lower_bounds, 0.0, 1.0)?;
        within("faults.silent", self.faults.silent, 0.0, 0.9)?;
        within("faults.blind", self.faults.blind, 0.0, 0.9)?;
        within("faults.lost_trials", self.faults.lost_trials, 0.0, 1.0)?;
        within("faults.clock_jumps", self.faults.clock_jumps, 0.0, 0.9)?;
        within("faults.amnesia", self.faults.amnesia, 0.0, 0.9)?;
        within("faults.lying", self.faults.lying, 0.0, 1e6)
    }
}

impl RawTrace {
    fn check(self) -> Result<Schedule, ScenarioError> {
        let schedule = match (self.schedule.as_deref(), self.custom) {
            (Some("c1"), None) => c1(),
            (Some("c2"), None) => c2(),
            (None, Some(custom)) => custom.check()?,
            (name, _) => {
                let value = name.unwrap_or("absent").to_owned();
                let allowed = "c1 or c2, or a [network.custom] instead".to_owned();
                return Err(ScenarioError::Value { key: "network.schedule", value, allowed });
            }
        };
        let scaled = self.rate_divisor.map_or(Ok(schedule.clone()), |d| schedule.scaled(d))?;
        Ok(self.epochs.map_or(Ok(scaled.clone()), |e| scaled.stretched(e))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: &str =
        "name = \"x\"\nseeds = [1]\n[job]\nmodel = \"resnet18\"\nranks = 8\n[network]\nschedule = \"c1\"\n[expect]\n";

    #[test]
    fn mistakes_are_named() {
        Scenario::from_toml(LEAST).unwrap();
        for (from, to, named) in [
            ("resnet18", "gpt9", "gpt9"),
            ("ranks = 8", "ranks = 800", "job.ranks is 800"),
            ("\"c1\"", "\"c9\"", "c9"),
            ("[expect]", "[expect]\nmost_chnges = 3", "most_chnges"),
            ("[expect]", "[planner]\ndwel_s = 3\n[expect]", "dwel_s"),
            ("[expect]", "[planner]\nconfidence = 7\n[expect]", "confidence is 7"),
            ("[expect]", "[planner]\nhysteresis = 0.1\n[expect]", "In its place: planner.confidence"),
            ("[expect]", "[faults]\nblind = 2.0\n[expect]", "faults.blind is 2"),
            ("[expect]", "[[odd_rank]]\nrank = 8\n[expect]", "odd_rank.rank is 8"),
        ] {
            let error = Scenario::from_toml(&LEAST.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
