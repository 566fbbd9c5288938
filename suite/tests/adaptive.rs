//! Runs that adapt: the trainer side under the clock of the network, and scripts.
#![allow(clippy::unwrap_used, missing_docs)]

use flexcomm_compression::Sizes;
use flexcomm_domain::{Decision, JobId, Plan, Strategy, Timestamp, Version};
use flexcomm_suite::adaptive::{
    self, AdaptiveRun, ControlPlane, Experiments, Prediction, RunUntil, Script, TimedOrder,
};
use flexcomm_suite::cells::{Cell, Net};
use flexcomm_suite::families;
use flexcomm_suite::fixed;
use flexcomm_suite::ranks::{Data, Model, Ranks, buckets};
use flexcomm_suite::score;
use flexcomm_trainer::MESSAGE_BYTES;
use flexcomm_truth::coefficients::Coefficients;
use flexcomm_truth::job::Token;
use flexcomm_truth::network::{Network, NetworkEvent};
use flexcomm_wire::{DecisionOrder, FromTrainer, Hello, JobOrders, ReportBody, StepRecord, TrialOrder, TrialReport};
use std::sync::Arc;

const WORLD: usize = 3;

fn strategy(text: &str) -> Strategy {
    text.parse().unwrap()
}

/// Steps of about 60 ms that compute for 50, on a network that does not change.
fn cell(steps: u64) -> Cell {
    let mut cell = families::drawn().into_iter().find(|cell| cell.family == "good").unwrap();
    (cell.world, cell.model, cell.batch, cell.steps) = (WORLD, Model::Convolutional, 33, steps);
    (cell.momentum, cell.learning_rate, cell.ranks_per_nic) = (0.9, 0.05, 1);
    (cell.compute_s, cell.values_factor, cell.codec_factor) = (0.05, 10.0, 1.0);
    cell.phases.truncate(1);
    cell.phases[0].nics.clear();
    (cell.phases[0].up_mbit, cell.phases[0].down_mbit, cell.phases[0].latency_ms) = (100.0, 100.0, 1.0);
    cell
}

fn data() -> Arc<Data> {
    Arc::new(Data::synthetic(WORLD))
}

fn run<B: ControlPlane>(cell: &Cell, initial: &str, control_plane: &mut B) -> AdaptiveRun {
    adaptive::run(cell, &Coefficients::frozen(), &data(), 1, strategy(initial), control_plane, RunUntil::WHOLE).unwrap()
}

/// Orders what it is told to at given times, and writes down what it hears.
#[derive(Default)]
struct Recorder {
    orders: Vec<(f64, JobOrders)>,
    ready: Option<JobOrders>,
    hellos: Vec<Hello>,
    said: Vec<(usize, FromTrainer)>,
}

impl ControlPlane for Recorder {
    type Token = usize;

    fn begin(&mut self, net: &mut Net<usize>) {
        self.orders.iter().enumerate().for_each(|(index, (at, _))| net.network.timer(*at, Token::Other(index)));
    }

    fn join(&mut self, _: &mut Network<Token<usize>>, hellos: Vec<Hello>) {
        self.hellos = hellos;
    }

    fn handle(&mut self, _: &mut Network<Token<usize>>, what: NetworkEvent<usize>) {
        let NetworkEvent::Timer(index) = what else { panic!("{what:?}") };
        self.ready = Some(self.orders[index].1.clone());
    }

    fn report(&mut self, network: &mut Network<Token<usize>>, rank: usize, message: FromTrainer) {
        assert!(network.now() > 0.0);
        self.said.push((rank, message));
    }

    fn orders(&mut self, rank: usize) -> Option<JobOrders> {
        if rank == 0 { self.ready.take() } else { None }
    }

    fn predictions(&self) -> Vec<Prediction> {
        vec![Prediction { version: Some(1), at_s: 0.5, plan: Plan::DENSE_RING, sync_s: 0.01 }]
    }
}

impl Recorder {
    fn trials(trials: &[(f64, TrialOrder)]) -> Self {
        let order = |(at, trial): &(f64, TrialOrder)| {
            (*at, JobOrders { job: JobId::new("suite").unwrap(), decision: None, trial: Some(trial.clone()) })
        };
        Self { orders: trials.iter().map(order).collect(), ..Self::default() }
    }

    fn steps(&self, rank: usize) -> Vec<StepRecord> {
        let steps = |(from, message): &(usize, FromTrainer)| match message {
            FromTrainer::Steps(report) if *from == rank => report.steps.clone(),
            _ => Vec::new(),
        };
        self.said.iter().flat_map(steps).collect()
    }

    fn trial_reports(&self, rank: usize) -> Vec<TrialReport> {
        let report = |(from, message): &(usize, FromTrainer)| match message {
            FromTrainer::Trial(report) if *from == rank => Some(report.clone()),
            _ => None,
        };
        self.said.iter().filter_map(report).collect()
    }
}

fn trial(id: u64, candidates: &[&str], budget_ms: u64) -> TrialOrder {
    let candidates = candidates.iter().map(|text| strategy(text).into()).collect();
    TrialOrder { run: None, id, candidates, iterations: 5, budget_ms }
}

const CANDIDATES: [&str; 4] = [
    "topk(k=0.1)+ef(vanilla)/allgather",
    "none/dense-ring",
    "powersgd(rank=2)+ef(vanilla)/dense-ring",
    "topk(k=0.1)+ef(vanilla)/art-ring:star",
];

/// Sizes of these do not depend on the values, so a curve's mean bytes are those of each step.
#[test]
fn a_script_of_one_strategy_is_the_fixed_setting() {
    let (cell, truth, data) = (cell(50), Coefficients::frozen(), data());
    for text in ["none/dense-ring", "fp16/dense-ring", "powersgd(rank=1)+ef(vanilla)/dense-ring"] {
        let ran = run(&cell, text, &mut Script::new(Vec::new()));
        let curve = fixed::train(cell.recipe(1), &data, &(text.to_owned(), strategy(text))).unwrap();
        assert_eq!((&ran.losses, ran.accuracy), (&curve.losses, Some(curve.accuracy)), "{text}");
        let ends = fixed::replay(&cell, &truth, 1, &curve).unwrap();
        assert_eq!(ran.ends.len(), ends.len());
        let apart = ran.ends.iter().zip(&ends).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        assert!(apart < 1e-9, "{text}: {apart}");
        assert_eq!((ran.switches.len(), ran.switches[0].strategy.as_str(), ran.switches[0].step), (1, text, 0));
    }
}

/// On a link on which nothing but the control group's message takes long.
#[test]
fn ranks_wait_for_the_message_that_is_due_unless_a_script_orders() {
    let mut cell = cell(3);
    cell.values_factor = 1e-3;
    (cell.phases[0].up_mbit, cell.phases[0].down_mbit) = (0.05, 0.05);
    let mut truth = Coefficients::frozen();
    truth.software.rendezvous = false;
    let message_s = MESSAGE_BYTES as f64 / (0.05e6 / 8.0);
    let dense = Strategy::DENSE_RING;
    let ordered =
        adaptive::run(&cell, &truth, &data(), 1, dense, &mut Script::new(Vec::new()), RunUntil::WHOLE).unwrap();
    let agreed = adaptive::run(&cell, &truth, &data(), 1, dense, &mut Recorder::default(), RunUntil::WHOLE).unwrap();
    assert!(ordered.ends[2] < 0.5, "{:?}", ordered.ends);
    // Rank 0 sends it to both others in each of the first steps.
    let longer = agreed.ends[2] - ordered.ends[2];
    assert!(longer > 3.0 * message_s && longer < 6.5 * message_s, "{longer} for 3 of {message_s}");
}

#[test]
fn a_script_changes_two_steps_after_its_time() {
    let change = |at_s, text| TimedOrder { at_s, strategy: strategy(text) };
    let changes = vec![change(0.5, CANDIDATES[0]), change(4.0, "fp16/dense-ring")];
    let ran = run(&cell(120), "none/dense-ring", &mut Script::new(changes.clone()));
    let [_, first, second] = &ran.switches[..] else { panic!("{:?}", ran.switches) };
    assert_eq!((first.version, first.strategy.as_str(), second.version), (1, CANDIDATES[0], 2));
    for (switch, change) in [first, second].into_iter().zip(changes) {
        let under_way = ran.ends.iter().position(|end| *end > change.at_s).unwrap() as u64;
        assert_eq!(switch.step, under_way + 2);
        assert_eq!(switch.at_s, ran.ends[switch.step as usize - 1]);
    }
}

#[test]
fn a_trial_takes_time_and_leaves_no_trace_in_what_is_learned() {
    let (cell, initial) = (cell(100), "topk(k=0.01)+ef(vanilla)/allgather");
    let mut alone = Recorder::default();
    let without = run(&cell, initial, &mut alone);
    // The second is aborted by its budget, within its first candidates.
    let trials = [(0.5, trial(1, &CANDIDATES, 60_000)), (5.0, trial(2, &CANDIDATES, 100))];
    let mut recorder = Recorder::trials(&trials);
    let with = run(&cell, initial, &mut recorder);
    assert_eq!((&with.losses, with.accuracy), (&without.losses, without.accuracy));
    for rank in 0..WORLD {
        let losses = |recorder: &Recorder| recorder.steps(rank).iter().map(|s| (s.step, s.loss)).collect::<Vec<_>>();
        // The last ones wait for a report that never comes.
        let both: Vec<_> = losses(&recorder).into_iter().zip(losses(&alone)).collect();
        assert!(both.len() > 80 && both.iter().all(|(with, without)| with == without), "{both:?}");
        let reports = recorder.trial_reports(rank);
        let [first, ..] = &reports[..] else { panic!() };
        assert_eq!((first.id, first.aborted.as_deref(), first.outcomes.len()), (1, None, 4));
        assert!(first.outcomes.iter().all(|o| o.iterations == 5 && o.sync_us > 0.0 && o.shadow_gain.is_none()));
        assert!(first.outcomes[0].gain < 0.9 && first.outcomes[1].gain == 1.0 && first.outcomes[0].comp_us > 0.0);
        // Twenty iterations that compute for 50 ms, and exchange.
        assert!((1e6..3e6).contains(&first.cost_us), "{}", first.cost_us);
        let completed = reports.iter().filter(|report| report.id == 1).max_by_key(|report| shadowed(report)).unwrap();
        // All ranks have those of top-k and PowerSGD, rank 0 has AR-Topk's; dense has none.
        assert_eq!(shadowed(completed), if rank == 0 { 3 } else { 2 }, "{completed:?}");
        let second = reports.iter().find(|report| report.id == 2).unwrap();
        assert!(second.aborted.as_deref().unwrap().contains("budget") && second.outcomes.len() < 3, "{second:?}");
    }
    let spent: Experiments = with.spent.iter().map(|spent| spent.on).sum();
    assert!((spent.seconds - (with.ends[99] - without.ends[99])).abs() < 0.2, "{spent:?}");
    assert!(spent.seconds > 1.0 && spent.bytes > 1e6 && spent.cpu_seconds > 0.05 * 20.0 * WORLD as f64, "{spent:?}");
    assert!(spent.shadow_seconds > 0.0, "{spent:?}");
    assert!(without.spent.is_empty() && with.spent.is_sorted_by(|a, b| a.at_s < b.at_s));
}

fn shadowed(report: &TrialReport) -> usize {
    report.outcomes.iter().filter(|outcome| outcome.shadow_gain.is_some()).count()
}

#[test]
fn what_trainers_say_passes_the_checks_of_the_wire_and_is_the_same_each_time() {
    let once = || {
        let mut recorder = Recorder::trials(&[(0.5, trial(1, &CANDIDATES, 60_000))]);
        let decision = Decision {
            job: JobId::new("suite").unwrap(),
            version: Version(1),
            parent: Version(0),
            plan: strategy(CANDIDATES[3]).into(),
            decided_at: Timestamp(0),
            reason: String::new(),
        };
        let (job, decision) = (decision.job.clone(), Some(DecisionOrder::from(&decision)));
        recorder.orders.push((2.5, JobOrders { job, decision, trial: None }));
        let ran = run(&cell(90), "none/dense-ring", &mut recorder);
        (ran, recorder)
    };
    let ((ran, recorder), (again, _)) = (once(), once());
    assert_eq!(serde_json::to_string(&ran).unwrap(), serde_json::to_string(&again).unwrap());
    let mut params: Vec<_> = buckets(&Model::Convolutional.network()).into_iter().flat_map(|b| b.params).collect();
    params.sort_by_key(|param| param.id);
    let layers = flexcomm_exchange::layers(&params).unwrap();
    for hello in &recorder.hellos {
        assert_eq!(hello.gradient_values, 143_180);
        hello.check().unwrap();
        assert!(hello.codecs.iter().any(|codec| codec.compressor == "topk(k=*)+ef(vanilla)"));
        for codec in &hello.codecs {
            let own = Sizes::codec(codec.compressor.parse().unwrap(), &layers);
            assert_eq!(codec.header_bytes, own.header_bytes, "{}: headers do not grow", codec.compressor);
        }
    }
    let mut kinds = [0; 3];
    for (_, message) in &recorder.said {
        let (kind, body) = match message.clone() {
            FromTrainer::Steps(report) => (0, ReportBody::Steps(report)),
            FromTrainer::Applied(report) => (1, ReportBody::Applied(report)),
            FromTrainer::Trial(report) => (2, ReportBody::Trial(report)),
            other => panic!("{other:?}"),
        };
        kinds[kind] += 1;
        body.check().unwrap();
    }
    // Reports of steps come every one to four seconds, and more often while they are news.
    let seconds = ran.ends[89];
    assert!(kinds[0] as f64 > 3.0 * seconds && (kinds[0] as f64) < 15.0 * seconds, "{kinds:?} in {seconds} s");
    assert_eq!((kinds[1], kinds[2]), (3, 3 + 3 * 2 + 2), "{kinds:?}");
    let records = recorder.steps(1);
    // Dense: of 143,180 values each rank sends 4/3 of the bytes.
    assert!((records[0].bytes_sent as f64 / (4.0 * 143_180.0 * 4.0 / 3.0) - 1.0).abs() < 0.01, "{:?}", records[0]);
    for step in &records {
        let parts = step.compute_us + step.comp_us + step.sync_us;
        assert!(step.wait_us.is_none() && step.step_us <= parts + 1.0 && step.compute_us < step.step_us, "{step:?}");
    }
    let [prediction] = &ran.predictions[..] else { panic!("{:?}", ran.predictions) };
    let switch = ran.switches[1].step as usize;
    let syncs: Vec<f64> =
        records.iter().filter(|step| step.step as usize >= switch).map(|s| s.sync_us * 1e-6).collect();
    let mean = syncs.iter().sum::<f64>() / syncs.len() as f64;
    assert!(prediction.true_s <= mean && prediction.true_s > 0.5 * mean, "{prediction:?}, rank 1's mean {mean}");
}

/// A change of the strategy keeps the residual; a dense step sends all of it, and steps after that are the library's own.
#[test]
fn residuals_outlive_a_change_and_are_flushed_by_dense() {
    let mut ranks = Ranks::new(cell(9).recipe(1), data()).unwrap();
    let texts = ["topk(k=0.01)+ef(vanilla)/allgather", "fp16/dense-ring", "none/dense-ring", "none/dense-ring"];
    let residual = |ranks: &Ranks| ranks.buckets(1).map(|(bucket, _)| bucket.residual()).collect::<Vec<_>>().concat();
    let mut kept = Vec::new();
    for (step, text) in texts.iter().enumerate() {
        let stepped = ranks.step(step as u64, &strategy(text)).unwrap();
        let energy: f64 = residual(&ranks).iter().map(|value| f64::from(*value).powi(2)).sum();
        kept.push((energy, stepped.buckets[0].energies.len()));
    }
    assert!(kept[0].0 > 0.0 && kept[1].0 < 1e-3 * kept[0].0, "{kept:?}");
    assert_eq!(kept[3], (0.0, 0), "{kept:?}");
}

/// Ranks behind one NIC reach each other without it.
#[test]
fn ranks_that_share_a_nic_train() {
    let cell = Cell { ranks_per_nic: 2, ..cell(10) };
    let ran = run(&cell, "none/dense-ring", &mut Script::new(Vec::new()));
    assert!(ran.ends.windows(2).all(|pair| pair[0] < pair[1]) && ran.ends[9] > 0.5, "{:?}", ran.ends);
}

/// A run that ends early has reached its target where the whole one has.
#[test]
fn a_run_ends_once_its_target_is_seen() {
    let cell = cell(150);
    let (truth, data) = (Coefficients::frozen(), Arc::new(Data::synthetic(WORLD)));
    let run = |goal| {
        let script = &mut Script::new(Vec::new());
        adaptive::run(&cell, &truth, &data, 1, Strategy::DENSE_RING, script, goal).unwrap()
    };
    let reached = |ran: &AdaptiveRun, target| score::steps_to(&score::smooth(&fixed::points(&ran.losses)), target);
    let whole = run(RunUntil::WHOLE);
    let target = score::smooth(&fixed::points(&whole.losses))[2].loss * 1.001;
    let goal = RunUntil { target, late_s: f64::INFINITY, is_whole: false };
    let ended = run(goal);
    assert_eq!(reached(&ended, target), reached(&whole, target));
    assert_eq!(
        (ended.ends.len(), ended.accuracy),
        (75, None),
        "the target is at 50 steps, and smoothing looks one ahead"
    );
    assert_eq!(ended.ends, whole.ends[..75]);
    let trained_on = run(RunUntil { is_whole: true, ..goal });
    assert_eq!((trained_on.losses.len(), &trained_on.ends, trained_on.accuracy), (4, &whole.ends, whole.accuracy));
    let late = run(RunUntil { target: 0.0, late_s: whole.ends[30], ..goal });
    assert_eq!(late.ends.len(), 50);
}
