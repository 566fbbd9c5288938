//! A job whose state tests move by hand.

use flexcomm_domain::{
    CompressionRatio, Gain, JobId, Link, LinkMatrix, Seconds, Selection, Strategy, Timestamp, Version,
};
use flexcomm_estimation::{Profile, ProfilePoint};
use flexcomm_optimizer::Evaluator;
use flexcomm_optimizer::policy::TimeToQuality;
use flexcomm_planner::{
    Alternative, InForce, Keep, LinkTest, Links, Measured, Outcome, PolicyConfig, Scatter, Snapshot, Verdict, check,
    decide,
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

/// Shadow trials measured top-k, whoever selects.
pub fn learn(s: &mut Snapshot, profile: Profile) {
    for selector in ["topk", "topk:star"] {
        s.profiles.by_selector.insert(selector.parse().unwrap(), profile.clone());
    }
    s.profiles.long_run = true;
}

#[derive(Clone)]
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
        // Without error feedback's help ratios matter most, and what is best depends on the network.
        let lost = TimeToQuality { exponent: Some(1.0), ..TimeToQuality::default() };
        s.config.policy = PolicyConfig::TimeToQuality(lost);
        learn(&mut s, profile(0.12, 0.004));
        let now = Timestamp(1_000_000_000);
        (s.profiles.measured_at, s.profiles.tried_at) = (Some(now), Some(now));
        let mut job = Self { s, now, rng: ChaCha8Rng::seed_from_u64(1) };
        job.network(0.001, 25e9);
        job
    }

    /// The training has so many steps, of which so many are taken.
    pub fn has_steps(&mut self, steps: f64, taken: u64) {
        let policy = self.s.config.policy.time_to_quality();
        self.s.config.policy = PolicyConfig::TimeToQuality(TimeToQuality { steps: Some(steps), ..policy });
        self.s.steps_taken = taken;
    }

    /// All links are so, and tests between all nodes have just found that.
    pub fn network(&mut self, alpha: f64, bandwidth: f64) {
        self.latencies(alpha, bandwidth);
        let (links, ranks) = (self.s.links.as_mut().unwrap(), self.s.ranks);
        let pairs = (0..ranks * ranks).map(|i| (i / ranks, i % ranks)).filter(|(from, to)| from != to);
        let bandwidth = links.matrix.worst().bandwidth;
        links.tests = pairs
            .map(|(from, to)| LinkTest { from, to, bandwidth, is_lower_bound: false, is_short: false, at: self.now })
            .collect();
    }

    /// All links are so; no test has shown the bandwidth.
    pub fn latencies(&mut self, alpha: f64, bandwidth: f64) {
        let matrix = LinkMatrix::uniform(self.s.ranks as usize, Link::new(alpha, bandwidth).unwrap()).unwrap();
        let (age, tests) = (seconds(0.5), self.s.links.take().map_or_else(Vec::new, |links| links.tests));
        self.s.links = Some(Links { matrix, age, oldest: age, confidence: 0.9, tests });
    }

    /// What steps of a strategy take to compress and to wait on the network as it is, by the cost model, and what they keep.
    pub fn truth(&self, strategy: &Strategy) -> (f64, f64, f64) {
        let problem = self.s.problem(&self.s.links.as_ref().unwrap().matrix, self.s.profiles.by_selector.clone());
        let is = Evaluator::new(&problem).evaluate(strategy).unwrap();
        (is.t_comp.get(), is.t_sync.get(), is.gain.get())
    }

    /// A trial ends now and tells what it measured.
    pub fn answer(&mut self, profile: Profile) {
        learn(&mut self.s, profile);
        let p = &mut self.s.profiles;
        (p.measured_at, p.tried_at, p.ended_at) = (Some(self.now), Some(self.now), Some(self.now));
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
            Verdict::Change(d) => panic!("changed to {}: {}", d.plan, d.reason),
        }
    }

    /// Steps under the decision in force compress and wait for so long, and keep so much.
    pub fn measure(&mut self, t_comp: f64, t_sync: f64, gain: f64) {
        let t_step = self.s.compute.map_or(0.0, Seconds::get) + t_comp + t_sync;
        self.s.measured = Some(Measured {
            version: self.s.version(),
            steps: 50,
            t_step: seconds(t_step),
            t_comp: seconds(t_comp),
            t_sync: seconds(t_sync),
            gain: Gain::new(gain).unwrap(),
            gain_spread: 0.0,
            scatter: Some(Scatter {
                step_low: seconds(0.95 * t_step),
                step_high: seconds(1.05 * t_step),
                sync_low: seconds(0.95 * t_sync),
                sync_high: seconds(1.05 * t_sync),
            }),
        });
    }

    /// Steps of what is in force take and keep what they should, slower by a factor, for so many looks a second apart. Answers every
    /// outcome.
    pub fn run(&mut self, looks: usize, slower: impl Fn(&Strategy) -> f64) -> Vec<Outcome> {
        let look = |_| {
            self.wait(1.0);
            let is = self.strategy();
            let (t_comp, t_sync, gain) = self.truth(&is);
            // No two medians are the same.
            let noise = 1.0 + 1e-3 * (self.now.0 / 1_000_000 % 7) as f64;
            self.measure(t_comp, t_sync * slower(&is) * noise, gain);
            self.call()
        };
        (0..looks).map(look).collect()
    }

    pub fn strategy(&self) -> Strategy {
        *self.s.plan().last()
    }
}

/// The report's alternative of a strategy.
pub fn of<'a>(outcome: &'a Outcome, strategy: &str) -> &'a Alternative {
    let strategy: flexcomm_domain::Plan = strategy.parse().unwrap();
    let found = outcome.report.alternatives.iter().find(|a| a.plan == strategy);
    found.unwrap_or_else(|| panic!("no {strategy}"))
}

/// The version after this one.
pub fn next(version: u64) -> Version {
    Version(version + 1)
}
