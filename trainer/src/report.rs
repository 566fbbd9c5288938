//! Hands a rank's telemetry to the agent's client, by this process's clock.

use crate::agreement::InForce;
use crate::client::Client;
use crate::orders::OrdersSlot;
use crate::telemetry::Telemetry;
use flexcomm_domain::{Energy, JobId, Plan, Rank, Strategy, Version};
use flexcomm_wire::{FromTrainer, StepRecord, TrialReport};
use std::time::{Duration, Instant};

/// How long the end of the job waits for the agent to take the last reports.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// A rank's reports. Without an agent they go nowhere.
#[derive(Debug)]
pub struct Reporter {
    client: Option<Client>,
    telemetry: Telemetry,
    clock: Instant,
}

impl Reporter {
    /// Not connected yet.
    pub fn new(job: JobId, rank: Rank) -> Self {
        Self { client: None, telemetry: Telemetry::new(job, rank), clock: Instant::now() }
    }

    /// From now on to this agent.
    pub fn connect(&mut self, client: Client) {
        self.client = Some(client);
    }

    /// The agent's client.
    pub fn client(&self) -> Option<&Client> {
        self.client.as_ref()
    }

    /// The orders that the agent has sent; none without an agent.
    pub fn orders(&self) -> Option<&OrdersSlot> {
        self.client.as_ref().map(Client::orders)
    }

    fn send(&self, messages: impl IntoIterator<Item = FromTrainer>) {
        if let Some(client) = &self.client {
            messages.into_iter().for_each(|message| client.send(message));
        }
    }

    /// Takes in a step that ran this plan under this version.
    pub fn step(&mut self, running: (Version, Plan), record: StepRecord) {
        if self.client.is_some() {
            let messages = self.telemetry.step(running, record, self.clock.elapsed());
            self.send(messages);
        }
    }

    /// Hands on what has gathered.
    pub fn flush(&mut self) {
        let message = self.telemetry.flush(self.clock.elapsed());
        self.send(message);
    }

    /// A decision is in force.
    pub fn applied(&mut self, in_force: &InForce) {
        let messages = self.telemetry.applied(in_force, self.clock.elapsed());
        self.send(messages);
    }

    /// A live trial ended.
    pub fn trial(&mut self, report: TrialReport) {
        tracing::info!(
            trial = report.id,
            outcomes = report.outcomes.len(),
            cost_us = report.cost_us,
            aborted = report.aborted.as_deref(),
            "live trial ended"
        );
        let message = self.telemetry.trial(report);
        self.send([message]);
    }

    /// See [`Telemetry::trial_refused`].
    pub fn trial_refused(&mut self, id: u64, why: &str) {
        let message = self.telemetry.trial_refused(id, why);
        self.send([message]);
    }

    /// See [`Telemetry::forget_trial`].
    pub fn forget_trial(&mut self) {
        self.telemetry.forget_trial();
    }

    /// See [`Telemetry::shadows_took`].
    pub fn shadows_took(&mut self, took: Duration) {
        self.telemetry.shadows_took(took);
    }

    /// See [`Telemetry::shadows`].
    pub fn shadows(&mut self, energies: &[(Strategy, Energy)]) {
        let message = self.telemetry.shadows(energies);
        self.send(message);
    }

    /// Says goodbye, without waiting for long.
    pub fn finish(&mut self) {
        self.flush();
        if let Some(client) = self.client.take() {
            client.finish(FLUSH_TIMEOUT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::{Answer, refusal};
    use crate::telemetry::LEAST_GAIN;
    use flexcomm_wire::{Hello, MAX_TEXT, PROTOCOL, ReportBody, TrialOutcome};
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    /// With what JSON cannot hold.
    fn record(step: u64) -> StepRecord {
        let (energy, loss) = (Some(f64::INFINITY), Some(f64::NAN));
        StepRecord { gain: 0.0, energy, loss, ..crate::pace::tests::record(step) }
    }

    /// What an agent reads when this is reported.
    fn received(report: impl FnOnce(&mut Reporter)) -> Vec<FromTrainer> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let job = JobId::new("j").unwrap();
        let hello = Hello::new(job.clone(), (2, 3), 1, "lab-tcp");
        let mut reporter = Reporter::new(job, Rank(2));
        reporter.connect(Client::start(&path, hello).unwrap());
        let (mut stream, _) = listener.accept().unwrap();
        writeln!(stream, r#"{{"kind":"welcome","protocol":{PROTOCOL},"node":"n1"}}"#).unwrap();
        report(&mut reporter);
        reporter.finish();
        let lines = BufReader::new(stream).lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        let mut received: Vec<FromTrainer> = lines.collect();
        assert!(
            matches!(received.first(), Some(FromTrainer::Hello { .. })) && received.pop() == Some(FromTrainer::Bye),
            "{received:?}"
        );
        received.split_off(1)
    }

    #[test]
    fn steps_of_another_strategy_are_another_report() {
        let [dense, sparse] = ["none/dense-ring", "topk@0.1/allgather"].map(|text| text.parse::<Plan>().unwrap());
        let received = received(|reporter| {
            let ran = [(Version(0), dense.clone()), (Version(0), dense.clone()), (Version(1), sparse.clone())];
            for (step, running) in (0..).zip(ran) {
                reporter.step(running, record(step));
            }
        });
        let [FromTrainer::Steps(first), FromTrainer::Steps(second)] = &received[..] else { panic!("{received:?}") };
        assert_eq!((first.version, first.rank, second.version), (0, 2, 1));
        assert_eq!(second.strategy, (&sparse).into());
        assert_eq!(
            first.steps.iter().map(|s| (s.step, s.gain)).collect::<Vec<_>>(),
            [(0, LEAST_GAIN), (1, LEAST_GAIN)]
        );
        assert_eq!(
            (first.steps[0].loss, first.steps[0].energy),
            (None, None),
            "NaN and infinity are no numbers of JSON"
        );
    }

    #[test]
    fn a_loss_beyond_what_a_report_may_have_is_the_largest() {
        let dense: Plan = "none/dense-ring".parse().unwrap();
        let received = received(|reporter| {
            for (step, loss) in (0..).zip([0.5, 1e30, -1e30]) {
                reporter.step((Version(0), dense.clone()), StepRecord { loss: Some(loss), ..record(step) });
            }
        });
        let [FromTrainer::Steps(steps)] = &received[..] else { panic!("{received:?}") };
        assert!(ReportBody::Steps(steps.clone()).check().is_ok());
        assert_eq!(steps.steps.iter().map(|s| s.loss).collect::<Vec<_>>(), [Some(0.5), Some(1e12), Some(-1e12)]);
    }

    /// Whatever the ranks answer, in characters of one byte or several.
    #[test]
    fn a_long_reason_is_cut_to_what_a_report_may_have() {
        for character in ["a", "é", "梯"] {
            let answers = [Answer::decode(&Answer::cannot(character.repeat(600)).encode()).unwrap()];
            let refusal = refusal(&answers).unwrap();
            let received = received(|reporter| reporter.trial_refused(6, &refusal));
            let [FromTrainer::Trial(report)] = &received[..] else { panic!("{received:?}") };
            assert_eq!(ReportBody::Trial(report.clone()).check(), Ok(()));
            let why = report.aborted.as_deref().unwrap();
            assert!(refusal.starts_with(why) && why.starts_with("rank 0: "), "{why}");
            assert_eq!(why.chars().count(), refusal.chars().count().min(MAX_TEXT));
        }
    }

    #[test]
    fn shadows_complete_what_ran_and_add_what_did_not() {
        let [ran, only] = ["topk@0.1/allgather", "topk@0.01/allgather"].map(|text| text.parse::<Strategy>().unwrap());
        let received = received(|reporter| {
            let kept = |strategy, sent| (strategy, Energy { sent, compensated: 4.0 });
            reporter.shadows(&[kept(ran, 2.0)]);
            reporter.trial_refused(6, "its loop cannot");
            let outcome = TrialOutcome {
                strategy: ran.into(),
                gain: 0.6,
                energy: Some(3.0),
                shadow_gain: None,
                shadow_energy: None,
                comp_us: 1.0,
                sync_us: 2.0,
                iterations: 10,
            };
            let job = JobId::new("j").unwrap();
            let outcomes = vec![outcome];
            reporter.trial(TrialReport {
                job,
                rank: 2,
                id: 7,
                outcomes,
                aborted: None,
                cost_us: 9.0,
                bytes: None,
                cpu_us: None,
                shadow_us: None,
            });
            [1, 2].into_iter().for_each(|ms| reporter.shadows_took(Duration::from_millis(ms)));
            reporter.shadows(&[kept(ran, 2.0), kept(only, 0.0)]);
            reporter.shadows(&[kept(only, 4.0)]);
            reporter.shadows(&[kept(ran, 1.6)]);
            reporter.forget_trial();
            reporter.shadows(&[kept(ran, 1.2)]);
        });
        let of = |message: &FromTrainer| match message {
            FromTrainer::Trial(r) => {
                let energies = r.outcomes.iter().map(|o| (o.energy, o.shadow_energy));
                let shadow = |o: &TrialOutcome| o.shadow_gain.map(|_| 4.0);
                let expected = |o: &TrialOutcome| (if o.iterations > 0 { Some(3.0) } else { shadow(o) }, shadow(o));
                assert!(energies.eq(r.outcomes.iter().map(expected)), "{r:?}");
                (r.id, r.outcomes.iter().map(|o| (o.gain, o.shadow_gain, o.iterations)).collect::<Vec<_>>())
            }
            other => panic!("{other:?}"),
        };
        let took: Vec<Option<f64>> = received
            .iter()
            .map(|message| if let FromTrainer::Trial(r) = message { r.shadow_us } else { None })
            .collect();
        assert_eq!(took, [None, None, Some(3e3), Some(3e3), Some(3e3)]);
        let found: Vec<_> = received.iter().map(of).collect();
        assert_eq!(
            found,
            [
                (6, vec![]),
                (7, vec![(0.6, None, 10)]),
                (7, vec![(0.6, Some(0.5), 10), (LEAST_GAIN, Some(LEAST_GAIN), 0)]),
                (7, vec![(0.6, Some(0.5), 10), (1.0, Some(1.0), 0)]),
                (7, vec![(0.6, Some(0.4), 10), (1.0, Some(1.0), 0)]),
            ]
        );
    }
}
