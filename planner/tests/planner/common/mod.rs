//! A job whose state tests move by hand.

use flexcomm_domain::{
    CompressionRatio, Gain, JobId, Link, LinkMatrix, Seconds, Selection, Strategy, Timestamp, Version,
};
use flexcomm_optimizer::policy::TimeToQuality;
use flexcomm_optimizer::{Profile, ProfilePoint};
use flexcomm_planner::{
    Alternative, InForce, Keep, Links, Measured, Outcome, PolicyConfig, Snapshot, Verdict, check, decide,
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

pub fn seconds(s: f64) -> Seconds {
    Seconds::new(s).unwrap()
}

/// A profile with gain c^exponent and a compression time of `scan` seconds.
pub fn profile(exponent: f64, scan: f64) -> Profile {
    let point = |c: f64| ProfilePoint {
        cr: CompressionRatio::new(c).unwrap(),
        gain: Gain::new(c.powf(exponent)).unwrap(),
        t_comp_s: scan * (1.0 + c),
        weight: 10.0,
    };
    Profile::new([0.1, 0.033, 0.011, 0.004, 0.001].map(point).to_vec()).unwrap()
}

/// A trial measured top-k, whoever selects.
pub fn learn(s: &mut Snapshot, profile: Profile) {
    for selector in ["topk", "topk:star"] {
        s.profiles.by_selector.insert(selector.parse().unwrap(), profile.clone());
    }
}

pub struct Job {
    pub s: Snapshot,
    pub now: Timestamp,
    pub rng: ChaCha8Rng,
}

impl Job {
    /// ResNet50 on 8 ranks over 1 ms and 25 Gbit/s, profile measured, nothing decided.
    pub fn new() -> Self {
        let mut s = Snapshot::new(JobId::new("job").unwrap(), 8, 25_560_000);
        s.compute = Some(seconds(0.025));
        // Of which a trial has told, see `learn`.
        s.config.selections = vec![Selection::Star];
        // What a test says of the network is so from then on.
        s.config.links_settle_s = seconds(0.0);
        // Without error feedback's help ratios matter most, and what is best depends on the network.
        let lost = TimeToQuality { exponent: Some(1.0), ..TimeToQuality::default() };
        s.config.policy = PolicyConfig::TimeToQuality(lost);
        learn(&mut s, profile(0.12, 0.004));
        (s.profiles.measured_at, s.profiles.tried_at) = (Some(Timestamp(1)), Some(Timestamp(1)));
        let mut job = Self { s, now: Timestamp(1_000_000_000), rng: ChaCha8Rng::seed_from_u64(1) };
        job.network(0.001, 25e9);
        job
    }

    pub fn network(&mut self, alpha: f64, bandwidth: f64) {
        let link = Link::new(alpha, bandwidth).unwrap();
        let matrix = LinkMatrix::uniform(self.s.ranks as usize, link).unwrap();
        self.s.links = Some(Links { matrix, age: seconds(1.0), oldest: seconds(1.0), confidence: 0.9 });
    }

    /// What the model predicts of the strategy in force, after a call.
    pub fn modelled(&self, outcome: &Outcome) -> Option<Alternative> {
        outcome.report.alternatives.iter().find(|a| a.strategy == self.strategy()).cloned()
    }

    /// A trial ends now and tells what it measured.
    pub fn answer(&mut self, profile: Profile) {
        learn(&mut self.s, profile);
        let p = &mut self.s.profiles;
        (p.measured_at, p.tried_at, p.ended_at) = (Some(self.now), Some(self.now), Some(self.now));
    }

    /// What a step under the strategy in force really takes on such links: (t_step, t_comp, t_sync, gain).
    pub fn truth(&self, alpha: f64, bandwidth: f64) -> (f64, f64, f64, f64) {
        let mut other = Self { s: self.s.clone(), now: self.now, rng: self.rng.clone() };
        other.network(alpha, bandwidth);
        // Not as measured on the network of now.
        other.s.memory.seen.clear();
        other.s.measured = None;
        let a = decide(&other.s, other.now, &mut other.rng).report.in_force.unwrap();
        (a.t_step_s, a.t_comp_s, a.t_sync_s, a.gain.get())
    }

    pub fn wait(&mut self, s: f64) {
        self.now = self.now.plus(seconds(s));
    }

    /// One call; the answer must pass the checker. What it decides is in force at once.
    pub fn call(&mut self) -> Outcome {
        let outcome = decide(&self.s, self.now, &mut self.rng);
        let violations = check(&self.s, &outcome, self.now);
        assert!(violations.is_empty(), "{violations:?} in {:?}", outcome.report.why);
        self.s.memory = outcome.memory.clone();
        if let Some(decision) = outcome.decision() {
            self.s.in_force = Some(InForce { decision: decision.clone(), applied_at_step: Some(1) });
            self.s.measured = None;
        }
        outcome
    }

    /// A call after which nothing may have changed.
    pub fn keeps(&mut self) -> Keep {
        match self.call().verdict {
            Verdict::Keep(keep) => keep,
            Verdict::Change(d) => panic!("changed to {}: {}", d.strategy, d.reason),
        }
    }

    /// Steps under the decision in force cost this.
    pub fn measure(&mut self, t_step: f64, t_comp: f64, t_sync: f64, gain: f64) {
        self.s.measured = Some(Measured {
            version: self.version(),
            steps: 50,
            t_step: seconds(t_step),
            t_comp: seconds(t_comp),
            t_sync: seconds(t_sync),
            gain: Gain::new(gain).unwrap(),
            gain_spread: 0.0,
            scatter: None,
        });
    }

    /// The same measurement for longer than the guard's timeout, with fresh links; then its answer.
    pub fn suffers(&mut self, t_step: f64, t_comp: f64, t_sync: f64, gain: f64) -> Outcome {
        self.measure(t_step, t_comp, t_sync, gain);
        let first = self.call();
        assert!(!first.report.rollback, "too early: {}", first.report.why);
        self.wait(11.0);
        self.call()
    }

    /// As [`Self::suffers`] where the way back sends more: three times the timeout.
    pub fn suffers_in_doubt(&mut self, t_step: f64, t_comp: f64, t_sync: f64, gain: f64) -> Outcome {
        let early = self.suffers(t_step, t_comp, t_sync, gain);
        assert!(!early.report.rollback, "too early: {}", early.report.why);
        self.wait(20.0);
        self.call()
    }

    pub fn version(&self) -> Version {
        self.s.version()
    }

    pub fn strategy(&self) -> Strategy {
        self.s.strategy()
    }
}
