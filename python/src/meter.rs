//! What a step cost on this rank.

use flexcomm_compression::Energy;
use flexcomm_trainer::{Costs, weighted};
use std::time::{Duration, Instant};

/// A step's times so far.
#[derive(Debug, Clone, Copy)]
pub struct Meter {
    /// End of the step before.
    began: Instant,
    comp: Duration,
    /// Within the hook, so that backward waited for it.
    in_hook: Duration,
    blocked: Duration,
    last_launch: Instant,
    last_done: Instant,
    bytes: f64,
    energy: Energy,
    /// The buckets' gains by their values, and by the energy of their gradients before error feedback: none once one's is not known,
    /// as of a gradient that only a device has.
    by_values: Energy,
    by_fresh: Option<Energy>,
    /// Whether every bucket ran what the plan says.
    pub faithful: bool,
}

impl Meter {
    /// From `now` on.
    pub fn new(now: Instant) -> Self {
        Self {
            began: now,
            comp: Duration::ZERO,
            in_hook: Duration::ZERO,
            blocked: Duration::ZERO,
            last_launch: now,
            last_done: now,
            bytes: 0.0,
            energy: Energy::default(),
            by_values: Energy::default(),
            by_fresh: Some(Energy::default()),
            faithful: true,
        }
    }

    /// Work within the hook that began at `from`.
    pub fn hook_work(&mut self, from: Instant) {
        self.add_compression(from.elapsed(), true);
    }

    /// Work after a collective.
    pub fn other_work(&mut self, from: Instant) {
        self.add_compression(from.elapsed(), false);
    }

    /// Compression that took so long, within the hook or after a collective.
    pub fn add_compression(&mut self, spent: Duration, in_hook: bool) {
        self.comp += spent;
        self.in_hook += if in_hook { spent } else { Duration::ZERO };
    }

    /// A collective starts in which this rank sends so many bytes.
    pub fn launched(&mut self, bytes: f64) {
        self.last_launch = Instant::now();
        self.bytes += bytes;
    }

    /// The hook has waited for the collective that was launched last.
    pub fn waited(&mut self) {
        self.blocked += self.last_launch.elapsed();
    }

    /// A bucket's result is there.
    pub fn done(&mut self, energy: Energy) {
        self.last_done = Instant::now();
        self.energy = self.energy + energy;
    }

    /// A bucket of so many values keeps this of its gradient, which has this energy where that is known: for steps whose buckets run
    /// different strategies.
    pub fn kept(&mut self, energy: Energy, values: usize, fresh: Option<f64>) {
        self.by_values = self.by_values + weighted(energy, values as f64);
        self.by_fresh = self.by_fresh.zip(fresh).map(|(sum, fresh)| sum + weighted(energy, fresh));
    }

    /// Ends the step, and begins the next. `alike`: all buckets ran the same strategy.
    pub fn finish(&mut self, alike: bool) -> Costs {
        let now = Instant::now();
        let step = now - self.began;
        // What backward waited for after it had handed over its last bucket.
        let tail = self.last_done.saturating_duration_since(self.last_launch);
        let compute = step.saturating_sub(self.in_hook + self.blocked + tail);
        // What collectives took behind backward is no time that a smaller message would save.
        let after = self.comp.saturating_sub(self.in_hook);
        let sync = (self.blocked + tail).saturating_sub(after);
        let energy = if alike { self.energy } else { self.by_fresh.unwrap_or(self.by_values) };
        let costs = Costs {
            compute,
            comp: self.comp,
            sync,
            wait: None,
            step,
            bytes: self.bytes as u64,
            energy,
            bucket_energies: Vec::new(),
        };
        *self = Self::new(now);
        costs
    }
}
