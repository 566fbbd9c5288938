//! What a rank knows between buckets: the agreement, the orders, the trial, the meter.

use crate::guard::Failure;
use crate::meter::Meter;
use crate::names::is_cast;
use crate::telemetry::{Ended, Event};
use flexcomm_compression::pipeline::Member;
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_domain::{Digest, JobId, Plan, Rank, RunId, Selection, Strategy};
use flexcomm_exchange::{AutoSelection, Deferred, Leader, LeaderShadows, Param, Shadows, Status, Store, lock};
use flexcomm_trainer::{
    AbortCause, Agreement, Answer, Change, Clocks, Control, Costs, Reporter, Tick, Trial, TrialPlan, Verdict,
    takes_energies,
};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Steps in which nothing is compressed: DDP rebuilds its buckets after the first, with static graph after the
/// second, and the order of parameters changes with it.
const WARM_UP: u64 = 3;

/// Who chooses the leader of AR-Topk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leadership {
    /// The decision.
    Decision,
    /// The user.
    Fixed(Selection),
    /// Measured skew and staleness.
    Auto,
}

impl std::str::FromStr for Leadership {
    type Err = Failure;
    fn from_str(text: &str) -> Result<Self, Failure> {
        match text {
            "decision" => Ok(Self::Decision),
            "auto" => Ok(Self::Auto),
            "star" => Ok(Self::Fixed(Selection::Star)),
            "var" => Ok(Self::Fixed(Selection::Var)),
            _ => Err(Failure::input(format!("selection {text:?} is not one of decision, star, var, auto"))),
        }
    }
}

/// What the end of a step asks of Python.
#[pyclass(eq, frozen)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Nothing.
    Train,
    /// Another decision is in force.
    Switched,
    /// Take a snapshot; the next step is a trial's first.
    TrialStarts,
    /// Restore; the next candidate starts.
    Candidate,
    /// Restore; the trial is over.
    TrialEnds,
    /// The trial is over, and this step trained: keep what it did.
    TrialLeft,
}

/// A rank's part in an exchange, with the numbers that ranks send each other.
#[pyclass(name = "Status", eq, eq_int, frozen)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartStatus {
    Ready = 0,
    Failed = 1,
    NotFinite = 2,
    Overflowed = 3,
}

impl From<Status> for PartStatus {
    fn from(status: Status) -> Self {
        match status {
            Status::Ready => Self::Ready,
            Status::Failed => Self::Failed,
            Status::NotFinite => Self::NotFinite,
            Status::Overflowed => Self::Overflowed,
        }
    }
}

/// Why a rank had no part in an exchange.
#[pyclass(frozen, get_all)]
#[derive(Debug, Clone)]
pub struct Fault {
    pub status: PartStatus,
    pub why: String,
}

/// What compresses a bucket in a step, and where its steps are.
#[derive(Debug, Clone, Copy)]
pub struct Running {
    pub spec: CompressorSpec,
    digest: u64,
    /// Added to the agreement's step: a loaded checkpoint goes on where it was.
    pub offset: u64,
}

impl Running {
    pub fn of(spec: CompressorSpec) -> Self {
        Self { spec, digest: Digest::of(&spec.to_string()).0, offset: 0 }
    }

    /// Counts up with every step that trains; the same on every rank.
    pub fn step(&self, tick: &Tick) -> u64 {
        tick.index().wrapping_add(self.offset)
    }

    /// Part of the control header's check: what the agreement does not know of.
    pub fn tag(&self, layout: Digest, step: u64, restored: bool) -> u64 {
        let mut hash = self.digest;
        for byte in [layout.0, step, u64::from(restored)].iter().flat_map(|number| number.to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        hash
    }
}

fn no_step() -> Failure {
    Failure::Run("failed to exchange a bucket: no step has begun".into())
}

/// Everything but the buckets' contents.
pub struct Session {
    pub job: JobId,
    /// Which run of the job this is, as the ranks agreed.
    pub run: Option<RunId>,
    pub rank: Rank,
    pub world: u32,
    pub control: Control,
    pub leadership: Leadership,
    pub auto: AutoSelection,
    pub store: Store,
    pub reporter: Reporter,
    pub meter: Meter,
    pub shadows: Shadows,
    /// The same of AR-Topk, over all ranks.
    pub leader_shadows: LeaderShadows,
    /// The generation of them in which they look at gradients of a device on the host.
    pub host_generation: Option<u64>,
    /// Whether the newest bucket of the step under way may be compressed yet.
    pub settled: bool,
    pub follow: bool,
    pub tick: Option<Tick>,
    /// What runs until the first decision, when the user names it.
    pub named: Option<Running>,
    /// What runs in the step under way, for each strategy of its plan.
    running: Vec<Running>,
    /// Energies of gradients before error feedback, of buckets on the host in a step for which they are [taken](Self::wants_energies).
    pub fresh: BTreeMap<usize, f64>,
    /// The same of buckets on a device, in steps in which they are [reported](Self::reports_energies): gains are not weighted by them, since
    /// they are not known in every step.
    pub on_device: BTreeMap<usize, f64>,
    pub deferred: Deferred<Event>,
    /// Values of the buckets that DDP exchanged by itself in the newest step that it did, see [`Session::pass`].
    passed: Vec<usize>,
    /// Values of the buckets of the step under way, of the step before, and those that were reported to the agent.
    layout: Vec<u64>,
    layout_before: Vec<u64>,
    layout_reported: Vec<u64>,
    /// Whether the hook has seen a bucket of the step under way.
    hooked: bool,
    /// Whether the automatic choice of leaders has seen one.
    led: bool,
    pub trial: Option<Trial>,
    clock: Instant,
    steps: u64,
    last_warning: Option<String>,
    /// What the newest step cost whose times are known, whatever ran.
    pub last: Option<Costs>,
    /// Whether a gradient or a loss of the iteration under way was not finite.
    pub diverged: bool,
    /// Why this rank can run no live trial now.
    pub trials_refused: Option<String>,
    /// Why this rank had no part in an exchange of the step under way.
    pub fault: Option<Fault>,
}

impl Session {
    pub fn new(
        job: JobId,
        member: Member,
        initial: Strategy,
        leadership: Leadership,
        shadow_share: f64,
        model: &[Param],
    ) -> Self {
        let (rank, world) = (Rank(member.rank), member.world);
        let agreement = Agreement::new(rank, initial, 0);
        let now = Instant::now();
        Self {
            reporter: Reporter::new(job.clone(), rank),
            control: Control::new(agreement, rank),
            auto: AutoSelection::new(world),
            job,
            run: None,
            rank,
            world,
            leadership,
            store: Store::new(member),
            meter: Meter::new(now),
            shadows: Shadows::new(shadow_share, member.seed),
            leader_shadows: LeaderShadows::new(model),
            host_generation: None,
            settled: false,
            follow: true,
            tick: None,
            named: None,
            running: Vec::new(),
            fresh: BTreeMap::new(),
            on_device: BTreeMap::new(),
            deferred: Deferred::default(),
            passed: Vec::new(),
            layout: Vec::new(),
            layout_before: Vec::new(),
            layout_reported: Vec::new(),
            hooked: false,
            led: false,
            trial: None,
            clock: now,
            steps: 0,
            last_warning: None,
            last: None,
            diverged: false,
            trials_refused: None,
            fault: None,
        }
    }

    /// Starts a step, on its first bucket. Never waits.
    pub fn begin(&mut self) {
        self.poll_orders();
        self.led = false;
        self.fault = None;
        let tick = self.control.begin();
        let tick = Tick { plan: self.led_as_wanted(&tick), ..tick };
        self.running = tick.plan.strategies().iter().map(|strategy| self.runs_in(&tick, strategy)).collect();
        self.fresh.clear();
        self.on_device.clear();
        self.tick = Some(tick);
    }

    /// What a strategy of a step runs: what the user named, until the first decision; then what was decided.
    fn runs_in(&self, tick: &Tick, strategy: &Strategy) -> Running {
        let first = tick.version.0 == 0 && tick.trial.is_none();
        let spec = if first && is_cast(strategy) { CompressorSpec::NONE } else { *strategy.spec() };
        let named = self.named.filter(|named| first && named.spec == spec);
        let before = || self.running.iter().find(|running| running.spec == spec && running.offset == 0);
        named.or_else(|| before().copied()).unwrap_or_else(|| Running::of(spec))
    }

    /// What runs in a bucket of the step under way; as in a plan, the last one is also for all buckets behind.
    pub(crate) fn running(&self, bucket: usize) -> Result<Running, Failure> {
        self.running.get(bucket).or(self.running.last()).copied().ok_or_else(no_step)
    }

    /// Whether this trainer can run a strategy.
    fn runs(strategy: &Strategy) -> bool {
        strategy.spec().trainable().is_ok()
    }

    /// The agreement's step that the next backward pass begins.
    pub fn next_step(&self) -> u64 {
        self.control.look().step() + u64::from(self.tick.as_ref().is_some_and(|tick| tick.trial.is_none()))
    }

    /// The step under way.
    pub fn now(&self) -> Result<Tick, Failure> {
        self.tick.clone().ok_or_else(no_step)
    }

    /// Whether the energies of the buckets' gradients are taken in the step under way: where buckets run different strategies, and at
    /// [some of the others](takes_energies).
    pub fn wants_energies(&self) -> bool {
        self.reports_energies() || self.tick.as_ref().is_some_and(|tick| tick.plan.alike().is_none())
    }

    /// Whether they are reported.
    pub fn reports_energies(&self) -> bool {
        let is_one = |tick: &Tick| tick.trial.is_none() && takes_energies(tick.step);
        self.tick.as_ref().is_some_and(is_one) && self.reporter.client().is_some()
    }

    /// Those of all buckets, in steps in which they are reported.
    fn bucket_energies(&self, tick: &Tick) -> Vec<f64> {
        let known: BTreeMap<usize, f64> = self.fresh.iter().chain(&self.on_device).map(|(i, e)| (*i, *e)).collect();
        let all = takes_energies(tick.step) && known.len() == self.layout.len();
        if all { known.into_values().collect() } else { Vec::new() }
    }

    /// Whether buckets may be compressed yet, by how many steps came before this one.
    pub fn warm(&self) -> bool {
        self.steps >= WARM_UP
    }

    /// A bucket that DDP exchanges by itself, dense and without the hook.
    ///
    /// # Errors
    /// The agreed plan compresses: ranks with the hook would do that now, and wait for this one for ever.
    pub fn pass(&mut self, tick: &Tick, index: usize, n: usize) -> Result<(), Failure> {
        if self.warm() && !tick.plan.is_dense() {
            let (plan, step) = (&tick.plan, tick.step);
            return Err(Failure::Run(format!(
                "failed to exchange bucket {index} of step {step}: the ranks agreed on {plan}, but DDP still runs \
                 without the hook here; let each batch have one synchronised backward pass, with no_sync() for others"
            )));
        }
        if index == 0 {
            self.passed.clear();
        }
        self.passed.push(n);
        self.lay_out(index, n);
        self.meter.faithful &= self.warm() && tick.plan.is_dense();
        Ok(())
    }

    /// The hook sees a bucket. Answers whether DDP exchanged one like it by itself in the step before: some ranks register
    /// the hook earlier than others, and all must find a bucket settled in the same step.
    pub fn hooked(&mut self, index: usize, n: usize) -> bool {
        self.hooked = true;
        self.lay_out(index, n);
        self.passed.get(index) == Some(&n)
    }

    fn lay_out(&mut self, index: usize, n: usize) {
        self.layout.truncate(index);
        self.layout.push(n as u64);
    }

    /// Tells the agent the buckets once they are settled: DDP rebuilds them after the hello, see [`WARM_UP`].
    fn report_buckets(&mut self) {
        let layout = std::mem::take(&mut self.layout);
        let same = layout == self.layout_before && !layout.is_empty();
        let settled = self.warm() && same && layout != self.layout_reported;
        if let Some(client) = self.reporter.client().filter(|_| settled) {
            client.report_buckets(layout.clone());
            self.layout_reported.clone_from(&layout);
        }
        self.layout_before = layout;
    }

    /// Whether the next step needs the hook: DDP by itself is dense, and shows nothing to a shadow.
    pub fn wants_hook(&self) -> bool {
        let agreement = self.control.look();
        let dense = agreement.in_force().plan.is_dense() && !agreement.tries();
        !dense || self.shadows.under_way() || self.control.is_sampled()
    }

    /// What a tick that begins runs: AR-Topk by the selection that the user wants, which may not be the decision's. A trial's
    /// candidate is led by its own: what is found of it is its profile.
    fn led_as_wanted(&self, tick: &Tick) -> Plan {
        let selection = match self.leadership {
            Leadership::Fixed(selection) if tick.trial.is_none() => selection,
            Leadership::Auto if tick.trial.is_none() => self.auto.mode(),
            _ => return tick.plan.clone(),
        };
        let led = |strategy: &Strategy| {
            Strategy::new(*strategy.spec(), strategy.collective(), Some(selection)).unwrap_or(*strategy)
        };
        let strategies: Vec<Strategy> = tick.plan.strategies().iter().map(led).collect();
        Plan::by_bucket(&strategies).unwrap_or_else(|_| tick.plan.clone())
    }

    /// Steps of this process.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Who leads AR-Topk in a bucket of this step, the same on all ranks; none where no rank does.
    pub fn leader(&self, tick: &Tick, bucket: usize) -> Option<Leader> {
        let selection = tick.strategy(bucket).selection()?;
        Some(match self.leadership {
            Leadership::Auto if tick.trial.is_none() => self.auto.leader(tick.index()),
            _ => Leader::of(selection, tick.index(), self.world),
        })
    }

    /// Takes in who led AR-Topk in the step's first bucket under it, and the sums over ranks of what was to be sent: norms,
    /// their squares. A trial's steps are undone, and do not count.
    pub fn observe_leader(&mut self, leader: u32, [norms, squares]: [f32; 2]) {
        if std::mem::replace(&mut self.led, true) || self.tick.as_ref().is_none_or(|tick| tick.trial.is_some()) {
            return;
        }
        let before = self.auto.mode();
        self.auto.observe(leader, f64::from(norms), f64::from(squares));
        let (mode, skew) = (self.auto.mode(), self.auto.skew());
        if mode != before && self.leadership == Leadership::Auto {
            tracing::info!("AR-Topk's leaders are chosen by {mode} from here on: the ranks' skew is {skew:.2}");
        }
    }

    fn poll_orders(&mut self) {
        let orders = self.reporter.orders();
        if let Some(refused) = orders.and_then(|o| o.offer(self.control.agreement(), self.follow, Self::runs)) {
            self.warn_once(format!(
                "decision {} is {}, which this release cannot run; training goes on with the strategy in force",
                refused.version, refused.plan
            ));
        }
    }

    /// Some rank cannot run a trial. Rank 0 reports it, and measures what can be measured otherwise.
    fn refuse_trial(&mut self, plan: &TrialPlan, why: &str) {
        if self.control.begins_sampling() {
            self.leader_shadows.watch(&plan.candidates);
        }
        if self.rank != Rank(0) {
            return;
        }
        self.shadows.go_on_watching(&plan.candidates);
        self.warn_once(format!("this job cannot run live trials: {why}; only shadow gains are measured"));
        self.reporter.trial_refused(plan.id, why);
    }

    /// Whether the shadows look at gradients in the step that begins or is under way.
    pub fn watches(&self) -> bool {
        self.shadows.under_way() && self.tick.as_ref().is_none_or(|tick| tick.trial.is_none())
    }

    /// Whether what they look at are copies on the host of gradients of a device.
    pub fn shadows_on_host(&self) -> bool {
        self.host_generation == Some(self.shadows.generation())
    }

    /// Shows a bucket's gradient to the shadows.
    pub fn observe(&mut self, bucket: usize, gradient: &[f32]) -> Result<(), Failure> {
        if !self.control.is_sampled() && !self.watches() {
            return Ok(());
        }
        let began = self.clock.elapsed();
        if self.control.is_sampled() {
            self.leader_shadows.observe(lock(&self.store.bucket(bucket)?).params(), gradient);
        }
        if self.watches() {
            let shared = self.store.bucket(bucket)?;
            if let Err(error) = self.shadows.observe(bucket, &lock(&shared), gradient) {
                tracing::warn!(%error, "the shadow trial is dropped");
            }
        }
        self.shadows_took_since(began);
        Ok(())
    }

    fn shadows_took_since(&mut self, began: Duration) {
        self.reporter.shadows_took(self.clock.elapsed().saturating_sub(began));
    }

    /// What the shadows have seen of a step's buckets by now is all of it.
    pub fn end_shadows(&mut self) {
        let began = self.clock.elapsed();
        let gains = self.shadows.end_step();
        if self.shadows.under_way() || gains.is_some() {
            self.shadows_took_since(began);
        }
        if let Some(gains) = gains {
            self.reporter.shadows(&gains);
        }
    }

    /// This rank's sample for the shadows of AR-Topk, in a step in which the ranks send theirs to rank 0.
    pub fn sample(&mut self) -> Option<Vec<u8>> {
        self.control.sample()?;
        let began = self.clock.elapsed();
        let sample = self.leader_shadows.sample(self.control.begins_sampling(), self.store.buckets().iter().map(lock));
        self.shadows_took_since(began);
        Some(sample)
    }

    /// On rank 0: takes in all ranks' samples of the step under way, in rank order.
    pub fn take_samples(&mut self, rows: &[Vec<u8>]) {
        let began = self.clock.elapsed();
        if let Err(error) = self.leader_shadows.receive(rows, self.store.buckets().iter().map(lock)) {
            tracing::warn!(%error, "the shadow trials of AR-Topk are dropped");
        }
        self.shadows_took_since(began);
        if self.control.reports_samples() {
            let gains = self.leader_shadows.gains();
            if gains.is_empty() {
                tracing::info!(
                    "AR-Topk's candidates have no shadow gains: some rank's gradients are not seen on the host, or too few values are kept of a sample"
                );
            }
            self.reporter.shadows(&gains);
        }
    }

    /// This rank's answer in a step in which the ranks gather answers; none in others.
    pub fn answer(&self) -> Option<Answer> {
        let over = || self.trial.as_ref().is_some_and(|trial| trial.over_budget(self.clock.elapsed()));
        self.control.gathers().then(|| match &self.trials_refused {
            Some(why) => Answer::cannot(why),
            None if self.diverged => Answer::of(Verdict::Diverged),
            None if self.rank == Rank(0) && over() => Answer::of(Verdict::Budget),
            None => Answer::of(Verdict::GoOn),
        })
    }

    /// Ends a step, after its last bucket and the optimizer. With a `ticket` its times are a device's, see
    /// [`Session::resolve`]: the host's clock only saw how they were launched. `answers` are all ranks', where they were gathered.
    pub fn finish(&mut self, loss: Option<f64>, ticket: Option<u64>, answers: &[Answer]) -> Result<Next, Failure> {
        let Some(tick) = self.tick.take() else { return Ok(Next::Train) };
        let faithful = self.meter.faithful;
        let bucket_energies = self.bucket_energies(&tick);
        let costs = Costs { bucket_energies, ..self.meter.finish(tick.plan.alike().is_some()) };
        let took = costs.step;
        if tick.trial.is_none() {
            self.end_shadows();
        }
        self.steps += 1;
        self.report_buckets();
        if std::mem::take(&mut self.hooked) {
            self.passed.clear();
        }
        let mut next = Next::Train;
        match tick.trial {
            Some(at) if self.trial.is_some() => {
                self.defer(ticket, Event::Iteration(costs, at));
                next = if at.last { Next::Candidate } else { Next::Train };
            }
            Some(_) => self.defer(ticket, Event::Step(costs, None)),
            None => self.defer(ticket, Event::Step(costs, faithful.then_some((tick, loss)))),
        }
        Ok(self.change(next, took, answers))
    }

    fn change(&mut self, next: Next, took: Duration, answers: &[Answer]) -> Next {
        match self.control.finish(took, answers) {
            Change::None => next,
            Change::Switched(in_force) => {
                tracing::info!(version = %in_force.version, plan = %in_force.plan,
                    step = in_force.since_step, "in force");
                // Of the strategy that the user named, which is over.
                self.store.await_pipelines(Vec::new());
                self.defer(None, Event::Applied(in_force));
                Next::Switched
            }
            Change::TrialStarts(plan) => {
                // Not after the trial: they would pass for steps behind it.
                self.reporter.flush();
                self.diverged = false;
                self.shadows.watch(&plan.candidates);
                self.leader_shadows.watch(&plan.candidates);
                self.trial = Some(Trial::start(plan, Clocks::read(self.clock.elapsed())));
                Next::TrialStarts
            }
            Change::TrialRefused(plan, why) => {
                self.refuse_trial(&plan, &why);
                next
            }
            Change::TrialEnds(cause) => self.end_trial(cause),
            Change::TrialLeft => {
                self.end_trial(Some(AbortCause::Left));
                self.store.leave_trial();
                Next::TrialLeft
            }
            Change::Stop => self.end_trial(Some(AbortCause::Stopped)),
        }
    }

    fn end_trial(&mut self, cause: Option<AbortCause>) -> Next {
        let Some(trial) = self.trial.take() else { return Next::Train };
        let at = Clocks::read(self.clock.elapsed());
        self.defer(None, Event::Ended(Box::new(Ended { trial, cause, at })));
        Next::TrialEnds
    }

    /// Warns once per text, as when something else runs than what was decided.
    pub fn warn_once(&mut self, what: String) {
        if self.last_warning.as_deref() != Some(&what) {
            tracing::warn!("{what}");
            self.last_warning = Some(what);
        }
    }
}
