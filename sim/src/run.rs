//! Plays a schedule on a world with the real planner in charge, the checker on every outcome.

use crate::loss::LossLog;
use crate::policy;
use crate::schedule::Schedule;
use crate::world::{Store, Truth, World};
use flexcomm_domain::{Digest, JobId, Link, LinkMatrix, Plan, Seconds, Strategy, Timestamp, Version};
use flexcomm_planner::{Config, InForce, Keep, LinkTest, Links, Losses, Outcome, Snapshot, Verdict, check, decide};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// Time between two looks of the simulated controller, seconds.
const TICK_S: f64 = 1.0;
/// Estimates are renewed this often, seconds.
const PROBE_S: f64 = 5.0;
/// A published decision is in force after this long, seconds.
const APPLY_S: f64 = 0.5;
/// What a switch costs the job, seconds.
const SWITCH_S: f64 = 0.2;
/// Where the simulated clock starts, microseconds.
const EPOCH_US: u64 = 1_700_000_000_000_000;
/// Most looks of one run: a job that makes no progress ends with an error, not never.
const MAX_TICKS: u64 = 2_000_000;
/// A test that is a lower bound finds at least this share of a link's bandwidth.
const LEAST_FOUND: f64 = 0.3;

/// What goes wrong in a run, besides noise. Shares are per look.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Share of looks without step reports.
    pub silent: f64,
    /// Share of looks without a usable link matrix.
    pub blind: f64,
    /// Share of trials that never answer.
    pub lost_trials: f64,
    /// Share of looks before which the clock jumps back by up to an hour.
    pub clock_jumps: f64,
    /// Share of looks before which the planner's memory is lost.
    pub amnesia: f64,
    /// Share of looks before which the job's policy is replaced by another one, drawn at random.
    pub policies: f64,
    /// By how many times too large or too small rank 0's links are reported, latency and bandwidth; 0: they are as estimated.
    pub lying: f64,
}

/// How changes of the network reach the estimates.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Probes {
    /// They are in them after this long, seconds.
    pub lag_s: f64,
    /// Whether links are measured meanwhile, too, and not believed, so that estimates are fresh and wrong.
    pub disbelieved: bool,
    /// Share of throughput tests that find less than there is and are lower bounds.
    pub lower_bounds: f64,
}

impl Default for Probes {
    fn default() -> Self {
        Self { lag_s: 3.0, disbelieved: false, lower_bounds: 0.0 }
    }
}

/// A collective that becomes slower than its model from some epoch on.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Breakage {
    /// From this epoch on.
    pub epoch: u32,
    /// Which.
    pub collective: flexcomm_domain::Collective,
    /// Its time is multiplied by this.
    pub factor: f64,
}

/// Everything that defines a run; with a seed it is reproducible byte for byte.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Job and network.
    pub world: World,
    /// The network trace.
    pub schedule: Schedule,
    /// The planner's settings.
    pub config: Config,
    /// What the job offers.
    pub offer: flexcomm_planner::Offer,
    /// How the network is seen.
    pub probes: Probes,
    /// What goes wrong.
    pub faults: Faults,
    /// What breaks.
    pub breakages: Vec<Breakage>,
    /// The run ends after so many looks, wherever it is then; absent: with its schedule.
    pub most_looks: Option<u64>,
}

/// A decision with the moment it was made.
#[derive(Debug, Clone)]
pub struct Made {
    /// Epoch, as the schedule counts.
    pub epoch: u32,
    /// Simulated seconds since the start.
    pub at_s: f64,
    /// The whole answer.
    pub outcome: Outcome,
}

/// What came of a run.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// Simulated seconds to the end of the schedule.
    pub time_s: f64,
    /// Seconds that trials took of it.
    pub trial_s: f64,
    /// Every change, in order.
    pub made: Vec<Made>,
    /// How often the planner looked.
    pub looks: u64,
    /// How often nothing changed, by reason.
    pub kept: BTreeMap<&'static str, u64>,
    /// Broken rules, with the look they were found at; must be empty.
    pub violations: Vec<String>,
    /// Plan in force at the end of each epoch.
    pub at_epoch_end: BTreeMap<u32, Plan>,
    /// Digest of every answer's bytes, chained.
    pub transcript: Digest,
    /// One line per look at which something was weighed: epoch, time, what it came to, why.
    pub log: Vec<String>,
    /// Whether the run ended because it made no progress.
    pub stuck: bool,
}

/// Plays the schedule from the first epoch to the last.
pub fn run(setup: &Setup, seed: u64) -> Run {
    let mut player = Player::new(setup, seed);
    let schedule = &setup.schedule;
    let first = schedule.first_epoch();
    for epoch in first..first + schedule.epochs() {
        player.epoch(epoch);
        if player.has_ended() {
            break;
        }
    }
    player.run
}

struct Player<'a> {
    setup: &'a Setup,
    rng: ChaCha8Rng,
    planner_rng: ChaCha8Rng,
    world: World,
    store: Store,
    snapshot: Snapshot,
    matrix: Option<LinkMatrix>,
    /// The network as estimated, without noise.
    believed: Option<LinkMatrix>,
    changed_s: f64,
    links: Option<Links>,
    probed_s: f64,
    in_force: Plan,
    /// Steps since the plan in force was applied.
    steps: f64,
    /// Steps since the start, and how many of them were taken when the newest decision came into force.
    taken: f64,
    applied_from: u64,
    losses: LossLog,
    applies_s: Option<f64>,
    clock_us: u64,
    now_s: f64,
    done: f64,
    total: f64,
    run: Run,
}

impl<'a> Player<'a> {
    fn new(setup: &'a Setup, seed: u64) -> Self {
        let job = JobId::new("sim").unwrap_or_else(|_| unreachable!("a valid name"));
        let mut snapshot = Snapshot::new(job, setup.world.ranks as u32, setup.world.model.values);
        snapshot.times = setup.world.model.times();
        snapshot.buckets = setup.world.model.buckets.clone();
        snapshot.energies = setup.world.model.energies.clone();
        // Whose schedules are simulated.
        snapshot.backend = flexcomm_optimizer::LAB_BACKEND.to_owned();
        snapshot.config = setup.config.clone();
        snapshot.offer = setup.offer.clone();
        snapshot.compute = Seconds::new(setup.world.model.compute_s).ok();
        Self {
            setup,
            rng: ChaCha8Rng::seed_from_u64(seed),
            planner_rng: ChaCha8Rng::seed_from_u64(seed ^ 0x9E37_79B9_7F4A_7C15),
            world: setup.world.clone(),
            store: Store::default(),
            snapshot,
            matrix: None,
            believed: None,
            changed_s: 0.0,
            links: None,
            probed_s: f64::NEG_INFINITY,
            in_force: Plan::DENSE_RING,
            steps: 0.0,
            taken: 0.0,
            applied_from: 0,
            losses: LossLog::new(setup.world.model.loss),
            applies_s: None,
            clock_us: EPOCH_US,
            now_s: 0.0,
            done: 0.0,
            total: f64::from(setup.schedule.epochs()) * setup.world.model.steps_per_epoch,
            run: Run::default(),
        }
    }

    /// Until the epoch's share of full steps is done.
    fn epoch(&mut self, epoch: u32) {
        let matrix = self.world.matrix(self.setup.schedule.at(epoch).link());
        if matrix != self.matrix {
            (self.matrix, self.changed_s) = (matrix, self.now_s);
        }
        break_things(&mut self.world, &self.setup.breakages, epoch);
        let goal = self.done + self.world.model.steps_per_epoch;
        while self.done < goal {
            self.tick(epoch, goal);
            self.run.stuck = self.run.looks >= MAX_TICKS;
            if self.has_ended() {
                return;
            }
        }
        self.run.at_epoch_end.insert(epoch, self.in_force.clone());
    }

    fn has_ended(&self) -> bool {
        self.run.stuck || self.setup.most_looks.is_some_and(|most| self.run.looks >= most)
    }

    fn progress(&self) -> f64 {
        self.done / self.total
    }

    fn tick(&mut self, epoch: u32, goal: f64) {
        let Some(matrix) = self.matrix.clone() else { return };
        self.apply();
        let truth = self.world.truth(&self.in_force, &matrix, self.progress());
        let rate = 1.0 / truth.for_dense_step();
        let dt = TICK_S.min((goal - self.done) / rate + 1e-9);
        self.done += dt * rate;
        self.step(dt / truth.t_step, &truth);
        self.pass(dt);
        self.observe(&matrix, &truth);
        self.look(epoch, &matrix);
    }

    /// So many steps, each with a loss.
    fn step(&mut self, steps: f64, truth: &Truth) {
        self.steps += steps;
        let first = self.taken as u64;
        self.taken += steps;
        let of = (self.in_force.is_dense(), 1.0 / truth.steps());
        (first..self.taken as u64).for_each(|number| self.losses.step(number, of, &mut self.rng));
    }

    fn pass(&mut self, dt: f64) {
        self.now_s += dt;
        self.run.time_s = self.now_s;
        self.clock_us += (dt * 1e6) as u64;
    }

    /// The last decision reaches the ranks.
    fn apply(&mut self) {
        if self.applies_s.is_some_and(|at| self.now_s >= at) {
            self.applies_s = None;
            let Some(current) = self.snapshot.in_force.as_mut() else { return };
            current.applied_at_step = Some((self.now_s * 1e3) as u64);
            self.applied_from = self.taken as u64;
            if current.decision.plan != self.in_force {
                self.in_force = current.decision.plan.clone();
                self.steps = 0.0;
                self.pass(SWITCH_S);
            }
        }
    }

    /// What the agents report of this tick.
    fn observe(&mut self, matrix: &LinkMatrix, truth: &Truth) {
        let Probes { lag_s, disbelieved, lower_bounds } = self.setup.probes;
        let known = self.now_s - self.changed_s >= lag_s || self.links.is_none();
        let news = known && self.believed.as_ref() != Some(matrix);
        if news {
            self.believed = Some(matrix.clone());
        }
        let again = self.now_s - self.probed_s >= PROBE_S && (known || disbelieved);
        if let Some(believed) = self.believed.as_ref().filter(|_| again || news) {
            let links = lying(self.world.estimate(believed, &mut self.rng), self.setup.faults.lying);
            self.links = Some(tested(links, lower_bounds, Timestamp(self.clock_us), &mut self.rng));
            self.probed_s = self.now_s;
        }
        if let Some(links) = &mut self.links {
            links.oldest = Seconds::new((self.now_s - self.probed_s).max(0.0)).unwrap_or(Seconds::ZERO);
            // Latencies are probed all the time, bandwidths now and then.
            links.age = Seconds::new(links.oldest.get().min(1.0)).unwrap_or(Seconds::ZERO);
        }
        self.snapshot.measured = None;
        let version = match (&self.snapshot.in_force, self.applies_s) {
            (Some(f), None) => f.decision.version,
            // Before the first decision the job runs dense, and reports it.
            (None, _) => Version(0),
            (Some(_), Some(_)) => return,
        };
        let silent = chance(self.setup.faults.silent, &mut self.rng);
        let measured = self.world.measure((&self.in_force, truth), version, self.steps as u64, &mut self.rng);
        self.snapshot.measured = measured.filter(|_| !silent && self.steps >= 1.0);
    }

    /// The losses around the decision in force, as a controller has them at this look.
    fn losses_now(&mut self) -> Option<Losses> {
        let applied = self.snapshot.in_force.as_ref().filter(|f| f.applied_at_step.is_some());
        let losses = self.losses.reported(applied?.decision.version, self.applied_from)?;
        (!chance(self.setup.faults.silent, &mut self.rng)).then_some(losses)
    }

    /// One look of the controller: gather, decide, check, record.
    fn look(&mut self, epoch: u32, matrix: &LinkMatrix) {
        let faults = self.setup.faults;
        if chance(faults.clock_jumps, &mut self.rng) {
            self.clock_us -= self.rng.random_range(0..3_600_000_000);
        }
        if chance(faults.amnesia, &mut self.rng) {
            self.snapshot.memory = Default::default();
        }
        if chance(faults.policies, &mut self.rng) {
            let policy = policy::random(&self.snapshot, Timestamp(self.clock_us), &mut self.rng);
            self.snapshot.config.policy = policy.objective.clone().unwrap_or_else(|| self.setup.config.policy.clone());
            self.snapshot.policy = policy;
        }
        let blind = chance(faults.blind, &mut self.rng);
        self.snapshot.links = self.links.clone().filter(|_| !blind);
        self.snapshot.profiles = self.store.profiles.clone();
        self.snapshot.trial = self.store.trial.clone();
        self.snapshot.losses = self.losses_now();
        let now = Timestamp(self.clock_us);
        let outcome = decide(&self.snapshot, now, &mut self.planner_rng);
        self.run.looks += 1;
        let at = self.run.looks;
        let broken = check(&self.snapshot, &outcome, now);
        self.run.violations.extend(broken.iter().map(|v| format!("look {at}, epoch {epoch}: {v}")));
        self.record(epoch, &outcome);
        self.snapshot.memory = outcome.memory.clone();
        self.order_trial(&outcome, matrix);
    }

    fn record(&mut self, epoch: u32, outcome: &Outcome) {
        let text = match serde_json::to_string(outcome) {
            Ok(text) => text,
            Err(error) => return self.run.violations.push(format!("an answer cannot be serialised: {error}")),
        };
        self.run.transcript = Digest::of(&format!("{}{text}", self.run.transcript));
        if outcome.verdict != Verdict::Keep(Keep::AlreadyBest) || outcome.trial.is_some() {
            let trial = outcome.report.trial.as_deref().map_or_else(String::new, |t| format!(" [trial {t}]"));
            let (verdict, why) = (&outcome.report.verdict, &outcome.report.why);
            self.run.log.push(format!("epoch {epoch:>3} {:>8.1} s {verdict}: {why}{trial}", self.now_s));
        }
        match &outcome.verdict {
            Verdict::Keep(keep) => *self.run.kept.entry(keep.as_str()).or_default() += 1,
            Verdict::Change(decision) => {
                let before = self.snapshot.version();
                if decision.version <= before {
                    self.run.violations.push(format!("version {} after {before}", decision.version));
                }
                self.snapshot.in_force = Some(InForce { decision: decision.clone(), applied_at_step: None });
                self.applies_s = Some(self.now_s + APPLY_S);
                self.run.made.push(Made { epoch, at_s: self.now_s, outcome: outcome.clone() });
            }
        }
    }

    fn order_trial(&mut self, outcome: &Outcome, matrix: &LinkMatrix) {
        let Some(request) = &outcome.trial else { return };
        let asked = (Timestamp(self.clock_us), request.iterations);
        let (found, cost) = self.world.trial(request, matrix, self.progress(), &mut self.rng);
        self.pass(cost);
        self.run.trial_s += cost;
        if !chance(self.setup.faults.lost_trials, &mut self.rng) {
            self.store.learn(&found, asked, Timestamp(self.clock_us));
        }
    }
}

/// The links with those of rank 0 as it claims them.
fn lying(links: Links, factor: f64) -> Links {
    if factor <= 0.0 {
        return links;
    }
    let matrix = links.matrix.with(|from, to, is| {
        let claims = Link::new(is.alpha.get() * factor, is.bandwidth.get() * factor);
        if from == 0 || to == 0 { claims.unwrap_or(is) } else { is }
    });
    Links { matrix, ..links }
}

/// All links are tested at once. Of some the test finds only a part of the bandwidth, and the link counts as that.
fn tested(links: Links, lower_bounds: f64, at: Timestamp, rng: &mut ChaCha8Rng) -> Links {
    let mut bounds = BTreeSet::new();
    let matrix = links.matrix.with(|from, to, is| {
        if from == to || !chance(lower_bounds, rng) {
            return is;
        }
        bounds.insert((from, to));
        Link::new(is.alpha.get(), is.bandwidth.get() * rng.random_range(LEAST_FOUND..1.0)).unwrap_or(is)
    });
    let n = matrix.ranks();
    let pairs = (0..n * n).map(|i| (i / n, i % n)).filter(|(from, to)| from != to);
    let test = |(from, to): (usize, usize)| LinkTest {
        from: from as u32,
        to: to as u32,
        bandwidth: matrix.get(from, to).bandwidth,
        is_lower_bound: bounds.contains(&(from, to)),
        is_short: false,
        at,
    };
    let tests = pairs.map(test).collect();
    Links { matrix, tests, ..links }
}

/// What breaks in an epoch is slower from now on.
fn break_things(world: &mut World, breakages: &[Breakage], epoch: u32) {
    for b in breakages.iter().filter(|b| b.epoch == epoch) {
        if let Some(hidden) = world.model.hidden.get_mut(&b.collective) {
            hidden.fixed_s *= b.factor;
            hidden.latency *= b.factor;
            hidden.bandwidth *= b.factor;
        }
    }
}

fn chance(share: f64, rng: &mut ChaCha8Rng) -> bool {
    share > 0.0 && rng.random_bool(share.min(1.0))
}

/// Seconds the schedule takes when one strategy runs all the time, without any overhead.
pub fn fixed(setup: &Setup, strategy: &Strategy) -> f64 {
    epochs(setup, |epoch_cost| epoch_cost(strategy))
}

/// Seconds it takes with the truly best candidate in every epoch, known in advance and switched to for free:
/// what no planner can beat where the gradient is one bucket.
pub fn oracle(setup: &Setup, candidates: &[Strategy]) -> f64 {
    epochs(setup, |epoch_cost| candidates.iter().map(epoch_cost).fold(f64::INFINITY, f64::min))
}

/// Points per epoch at which the drifting gain is looked at.
const SAMPLES: u32 = 4;

fn epochs(setup: &Setup, cost: impl Fn(&dyn Fn(&Strategy) -> f64) -> f64) -> f64 {
    let schedule = &setup.schedule;
    let (first, count) = (schedule.first_epoch(), schedule.epochs());
    let mut world = setup.world.clone();
    let mut total = 0.0;
    for i in 0..count {
        break_things(&mut world, &setup.breakages, first + i);
        let Some(matrix) = world.matrix(schedule.at(first + i).link()) else { continue };
        let epoch_cost = |strategy: &Strategy| {
            let plan = Plan::from(*strategy);
            let at = |k: u32| (f64::from(i) + (f64::from(k) + 0.5) / f64::from(SAMPLES)) / f64::from(count);
            let sum: f64 = (0..SAMPLES).map(|k| world.truth(&plan, &matrix, at(k)).for_dense_step()).sum();
            sum / f64::from(SAMPLES) * world.model.steps_per_epoch
        };
        total += cost(&epoch_cost);
    }
    total
}
