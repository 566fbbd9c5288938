//! What a trainer's lines mean: pure, one [`Session`] per connection.

use flexcomm_wire::{FromTrainer, Hello, PROTOCOL, ReportBody};

/// What a line asks of the agent.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A valid hello, or what its rank says of itself later.
    Joined(Hello),
    /// Something for the controller.
    Report(ReportBody),
    /// A message whose values cannot be believed; the connection goes on.
    Rejected(String),
    /// An orderly end.
    Left,
}

/// One connection.
#[derive(Debug, Default)]
pub struct Session {
    seen: Option<Hello>,
}

impl Session {
    /// Who is there, once a hello was accepted.
    pub fn seen(&self) -> Option<&Hello> {
        self.seen.as_ref()
    }

    /// Reads one line. An error is the reason with which the connection is refused.
    pub(crate) fn line(&mut self, line: &[u8]) -> Result<Event, String> {
        let message = serde_json::from_slice(line);
        self.message(message.map_err(|error| format!("a line is not a known message: {error}"))?)
    }

    /// Takes one message.
    pub fn message(&mut self, message: FromTrainer) -> Result<Event, String> {
        let Some(seen) = &self.seen else {
            let FromTrainer::Hello { protocol, hello } = message else {
                return Err("the first line must be a hello".to_owned());
            };
            check_hello(protocol, &hello)?;
            return Ok(Event::Joined(self.seen.insert(hello).clone()));
        };
        let same = |job: &flexcomm_domain::JobId, rank: u32| -> Result<(), String> {
            if *job == seen.job && rank == seen.rank {
                return Ok(());
            }
            Err(format!(
                "a message of rank {rank} of job {job} on the connection of rank {} of job {}",
                seen.rank, seen.job
            ))
        };
        let body = match message {
            FromTrainer::Hello { .. } => return Err("a second hello on one connection".to_owned()),
            FromTrainer::Buckets { job, rank, values } => {
                same(&job, rank)?;
                let seen = Hello { buckets: values, ..seen.clone() };
                return Ok(match seen.check() {
                    Ok(()) => Event::Joined(self.seen.insert(seen).clone()),
                    Err(bad) => Event::Rejected(bad.to_string()),
                });
            }
            FromTrainer::Steps(steps) => {
                same(&steps.job, steps.rank)?;
                ReportBody::Steps(steps)
            }
            FromTrainer::Applied(applied) => {
                same(&applied.job, applied.rank)?;
                ReportBody::Applied(applied)
            }
            FromTrainer::Trial(trial) => {
                same(&trial.job, trial.rank)?;
                ReportBody::Trial(trial)
            }
            FromTrainer::Bye => return Ok(Event::Left),
            FromTrainer::Unknown => {
                return Ok(Event::Rejected("a message of a kind that this agent does not know".to_owned()));
            }
        };
        Ok(match body.check() {
            Ok(()) => Event::Report(body),
            Err(bad) => Event::Rejected(bad.to_string()),
        })
    }
}

fn check_hello(protocol: u32, hello: &Hello) -> Result<(), String> {
    if protocol != PROTOCOL {
        return Err(format!(
            "the trainer speaks protocol {protocol}, this agent speaks {PROTOCOL}; use the same version"
        ));
    }
    hello.check().map_err(|bad| bad.to_string())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use flexcomm_domain::{CodecBytes, CodecCost, Family};
    use flexcomm_wire::{CodecInfo, StepRecord, StepsReport};
    use proptest::prelude::*;

    pub(crate) fn hello(job: &str, rank: u32) -> Hello {
        let collectives = vec!["dense-ring".into()];
        Hello { collectives, ..Hello::new(job.parse().unwrap(), (rank, 4), 1000, "lab-tcp") }
    }

    fn greeting(hello: Hello) -> FromTrainer {
        FromTrainer::Hello { protocol: PROTOCOL, hello }
    }

    fn wide() -> CodecInfo {
        CodecInfo { value_bytes: 65.0, ..CodecInfo::new(Family::NONE, CodecBytes::DENSE) }
    }

    fn slow() -> CodecInfo {
        let costs = [CodecCost { value_s: 0.1, kept_s: 0.0 }; 2];
        CodecInfo { times: Some(costs.into()), ..CodecInfo::new(Family::NONE, CodecBytes::DENSE) }
    }

    fn line(message: &FromTrainer) -> Vec<u8> {
        serde_json::to_vec(message).unwrap()
    }

    fn joined() -> Session {
        let mut session = Session::default();
        session.line(&line(&greeting(hello("j", 1)))).unwrap();
        session
    }

    fn steps(change: impl FnOnce(&mut StepRecord)) -> FromTrainer {
        let mut step = StepRecord {
            step: 7,
            compute_us: 1.0,
            comp_us: 1.0,
            sync_us: 1.0,
            step_us: 3.0,
            bytes_sent: 10,
            gain: 1.0,
            energy: Some(1.0),
            loss: Some(2.0),
            ..StepRecord::default()
        };
        change(&mut step);
        let strategy = flexcomm_domain::Strategy::DENSE_RING.into();
        FromTrainer::Steps(StepsReport { job: "j".parse().unwrap(), rank: 1, version: 0, strategy, steps: vec![step] })
    }

    #[test]
    fn hello_comes_first_and_once() {
        assert!(Session::default().line(&line(&FromTrainer::Bye)).unwrap_err().contains("hello"));
        let mut session = joined();
        assert_eq!(session.seen().unwrap().rank, 1);
        assert!(session.line(&line(&greeting(hello("j", 1)))).unwrap_err().contains("second"));
        assert_eq!(session.line(&line(&FromTrainer::Bye)), Ok(Event::Left));
    }

    #[test]
    fn buckets_may_come_after_the_hello() {
        let buckets = |rank, values: &[u64]| {
            line(&FromTrainer::Buckets { job: "j".parse().unwrap(), rank, values: values.to_vec() })
        };
        assert!(Session::default().line(&buckets(1, &[1000])).unwrap_err().contains("hello"));
        let mut session = joined();
        assert!(session.line(&buckets(2, &[1000])).unwrap_err().contains("rank 2 of job j"));
        let expected = Hello { buckets: vec![400, 600], ..session.seen().unwrap().clone() };
        assert_eq!(session.line(&buckets(1, &[400, 600])), Ok(Event::Joined(expected.clone())));
        for (values, words) in [
            (vec![400, 601], "the buckets have 1001 values, and gradient_values is 1000"),
            (vec![1000, 0], "bucket 1 has 0 values"),
            (vec![1; 4097], "4097 buckets, at most 4096"),
        ] {
            let Ok(Event::Rejected(why)) = session.line(&buckets(1, &values)) else { panic!("{words}") };
            assert!(why.contains(words), "{why}");
        }
        assert_eq!(session.seen(), Some(&expected));
    }

    #[test]
    fn bad_hellos_are_refused_with_the_value() {
        type Case = (fn(&mut Hello), &'static str);
        let cases: [Case; 8] = [
            (|h| h.rank = 4, "rank 4 of 4"),
            (|h| h.world = 0, "of 0"),
            (|h| h.gradient_values = 0, "gradient_values is 0"),
            (|h| h.backend = "x".repeat(64), "1 to 63 bytes"),
            (|h| h.collectives = vec!["a".into(); 65], "65 collectives"),
            (|h| h.collectives = vec!["of-tomorrow".into()], "no collective of job j is known here"),
            (|h| h.codecs = vec![wide()], "codec none: codec's value bytes per value is 65"),
            (|h| h.codecs = vec![slow()], "codec none: codec's time per value is 0.1, allowed is 0 to 0.001 s"),
        ];
        for (change, expected) in cases {
            let mut hello = hello("j", 1);
            change(&mut hello);
            let error = Session::default().line(&line(&greeting(hello))).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let of_another = FromTrainer::Hello { protocol: 99, hello: hello("j", 1) };
        assert!(Session::default().line(&line(&of_another)).unwrap_err().contains("protocol 99"));
    }

    #[test]
    fn absurd_measurements_are_rejected_and_the_connection_goes_on() {
        let mut session = joined();
        assert!(matches!(session.line(&line(&steps(|_| {}))), Ok(Event::Report(_))));
        let changes: [fn(&mut StepRecord); 10] = [
            |s| s.sync_us = -1.0,
            |s| s.step_us = 1e300,
            |s| s.gain = 0.0,
            |s| s.gain = 7.0,
            |s| s.energy = Some(-1.0),
            |s| s.energy = Some(1e300),
            |s| s.bucket_energies = vec![1.0, -1.0],
            |s| s.bucket_energies = vec![1.0; 5000],
            |s| s.accuracy = Some(1.5),
            |s| s.bytes_sent = u64::MAX,
        ];
        for change in changes {
            assert!(matches!(session.line(&line(&steps(change))), Ok(Event::Rejected(_))));
        }
        assert!(matches!(session.line(&line(&steps(|_| {}))), Ok(Event::Report(_))));
    }

    #[test]
    fn any_strategy_may_have_run_and_what_is_none_is_rejected() {
        let ran = |strategy: &str| {
            let mut message = steps(|_| {});
            if let FromTrainer::Steps(report) = &mut message {
                report.strategy.0 = strategy.into();
            }
            joined().line(&line(&message)).unwrap()
        };
        for strategy in ["qsgd(s=16)+ef(vanilla)/allgather", "none@1/dense-ring", "fp16/dense-tree"] {
            assert!(matches!(ran(strategy), Event::Report(_)), "{strategy}");
        }
        for strategy in ["", "qsgd(s=0)", "qsgd(s=16)/dense-ring", "zebra/allgather", &"x".repeat(5000)] {
            assert!(matches!(ran(strategy), Event::Rejected(_)), "{strategy}");
        }
    }

    #[test]
    fn nan_is_no_json_and_others_ranks_are_refused() {
        let mut session = joined();
        let nan = line(&steps(|s| s.sync_us = f64::NAN));
        assert!(session.line(&nan).is_err());
        let mut other = steps(|_| {});
        if let FromTrainer::Steps(report) = &mut other {
            report.rank = 2;
        }
        assert!(session.line(&line(&other)).unwrap_err().contains("rank 2 of job j"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered(lines in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..5), greeted in any::<bool>()) {
            let mut session = if greeted { joined() } else { Session::default() };
            for bytes in lines {
                let _ = session.line(&bytes);
            }
        }

        #[test]
        fn damaged_messages_are_answered(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut session = joined();
            let mut bytes = line(&steps(|_| {}));
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = session.line(&bytes);
        }
    }
}
