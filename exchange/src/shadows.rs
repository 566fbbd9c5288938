//! A trial's candidates in shadow trials: which have one, for how long, and when what they found is worth a report.

use crate::bucket::Bucket;
use crate::error::ExchangeError;
use crate::shadow::{Shadow, ShadowGain};
use flexcomm_domain::{Energy, Strategy};

/// Steps that they go on for: five of the paper's live trials.
const STEPS: u64 = 50;

/// After how many they are reported: early, since a decision waits for it, and at the end.
const REPORTED_AT: [u64; 2] = [20, STEPS];

/// A rank's shadow trials. What fails in them is dropped: training is not their business.
#[derive(Debug)]
pub struct Shadows {
    share: f64,
    seed: u64,
    running: Option<(Shadow, Vec<Strategy>)>,
    generation: u64,
}

impl Shadows {
    /// Share of the gradient that is enough for an estimate.
    pub const SHARE: f64 = 0.25;

    /// None yet; they will look at this share of the gradient, drawn by `seed`.
    pub fn new(share: f64, seed: u64) -> Self {
        Self { share, seed, running: None, generation: 0 }
    }

    /// Whether a candidate has one here: dense loses nothing, and AR-Topk's are [`crate::LeaderShadows`].
    pub fn has(strategy: &Strategy) -> bool {
        !strategy.is_dense() && !strategy.collective().is_art()
    }

    /// Those of these candidates begin with the next step, instead of what is under way.
    pub fn watch(&mut self, candidates: &[Strategy]) {
        let strategies: Vec<Strategy> = candidates.iter().copied().filter(Self::has).collect();
        let specs: Vec<_> = strategies.iter().map(|strategy| *strategy.spec()).collect();
        self.generation += 1;
        self.running = (!specs.is_empty()).then(|| (Shadow::new(&specs, self.share, self.seed), strategies));
    }

    /// The same, but shadows of just these that are under way are not begun anew: who asks often would never get an answer.
    pub fn go_on_watching(&mut self, candidates: &[Strategy]) {
        let watched = |s: &Strategy| !Self::has(s) || self.running.iter().any(|(_, own)| own.contains(s));
        if !(self.under_way() && candidates.iter().all(watched)) {
            self.watch(candidates);
        }
    }

    /// What is under way begins anew.
    pub fn begin_anew(&mut self) {
        if let Some((_, strategies)) = self.running.take() {
            self.watch(&strategies);
        }
    }

    /// Whether they have not yet seen all the steps that they look at.
    pub fn under_way(&self) -> bool {
        self.running.as_ref().is_some_and(|(shadow, _)| shadow.steps() < STEPS)
    }

    /// A number that changes whenever they begin anew.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The trials of all candidates, for a caller whose gradients lie on a device.
    pub fn shadow(&mut self) -> Option<&mut Shadow> {
        self.running.as_mut().map(|(shadow, _)| shadow)
    }

    /// Forgets what is on the device of this bucket and all behind it, which began with another layout.
    pub fn forget_from(&mut self, index: usize) {
        self.generation += u64::from(self.shadow().is_some_and(|shadow| shadow.forget_from(index)));
    }

    /// Draws a bucket's samples where that is still to be done, which begin with its residual. Answers whether it was.
    pub fn begin(&mut self, index: usize, bucket: &Bucket) -> Result<bool, ExchangeError> {
        let begins = |shadow: &Shadow| shadow.steps() < STEPS && shadow.begins(index);
        let Some((shadow, _)) = self.running.as_mut().filter(|(shadow, _)| begins(shadow)) else { return Ok(false) };
        let begun = shadow.begin(index, bucket.params(), &bucket.residual());
        self.keep(begun).map(|()| true)
    }

    /// Takes in a bucket's gradient, before error feedback, in a step that trains.
    pub fn observe(&mut self, index: usize, bucket: &Bucket, gradient: &[f32]) -> Result<(), ExchangeError> {
        self.begin(index, bucket)?;
        let under_way = |shadow: &Shadow| shadow.steps() < STEPS;
        let Some((shadow, _)) = self.running.as_mut().filter(|(shadow, _)| under_way(shadow)) else { return Ok(()) };
        let observed = shadow.observe(index, bucket.params(), &[], gradient);
        self.keep(observed)
    }

    fn keep(&mut self, done: Result<(), ExchangeError>) -> Result<(), ExchangeError> {
        if done.is_err() {
            self.running = None;
        }
        done
    }

    /// What they have seen of a step's buckets by now is all of it. Answers what each candidate would keep of which energy, when that is
    /// to be reported.
    pub fn end_step(&mut self) -> Option<Vec<(Strategy, Energy)>> {
        let (shadow, _) = self.running.as_mut()?;
        let before = shadow.steps();
        shadow.end_step();
        let steps = shadow.steps();
        if steps >= STEPS {
            shadow.rest();
        }
        let due = steps > before && REPORTED_AT.contains(&steps);
        due.then(|| self.gains().filter(|(_, gain)| gain.steps > 0).map(|(s, gain)| (s, gain.recent)).collect())
    }

    /// What they have found so far.
    pub fn gains(&self) -> impl Iterator<Item = (Strategy, ShadowGain)> {
        self.running.iter().flat_map(|(shadow, strategies)| strategies.iter().copied().zip(shadow.gains()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::Param;
    use flexcomm_compression::pipeline::Member;

    fn strategies(texts: &[&str]) -> Vec<Strategy> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn bucket() -> Bucket {
        Bucket::new(0, vec![Param { id: 0, len: 4, cols: 1 }], Member::alone(1), Some(&[1.0, 0.0, 0.0, 0.0])).unwrap()
    }

    #[test]
    fn candidates_that_need_no_other_rank_are_reported_early_and_at_the_end() {
        let (mut shadows, bucket) = (Shadows::new(1.0, 7), bucket());
        let asked = strategies(&["none/dense-ring", "topk@0.5/allgather", "topk@0.5/art-ring:star"]);
        shadows.watch(&asked);
        let mut reported = Vec::new();
        for step in 1..=60 {
            shadows.observe(0, &bucket, &[3.0, 1.0, 0.5, 2.0]).unwrap();
            if let Some(found) = shadows.end_step() {
                assert_eq!(found.iter().map(|(strategy, _)| *strategy).collect::<Vec<_>>(), asked[1..2]);
                assert!((0.5..1.0).contains(&found[0].1.gain()), "{found:?}");
                reported.push(step);
            }
        }
        assert_eq!(reported, REPORTED_AT);
        assert!(!shadows.under_way() && shadows.gains().all(|(_, gain)| gain.steps == STEPS));
        shadows.watch(&asked[..1]);
        assert!(!shadows.under_way() && shadows.gains().next().is_none(), "shadows of nothing would never end");
    }

    #[test]
    fn what_is_asked_for_again_goes_on_and_what_is_not_watched_begins() {
        let (mut shadows, bucket) = (Shadows::new(1.0, 7), bucket());
        let asked = strategies(&["topk@0.5/allgather", "none/dense-ring"]);
        shadows.watch(&asked);
        assert!(shadows.begin(0, &bucket).unwrap() && !shadows.begin(0, &bucket).unwrap());
        shadows.observe(0, &bucket, &[1.0; 4]).unwrap();
        shadows.end_step();
        let (steps, generation) = (|shadows: &Shadows| shadows.gains().next().unwrap().1.steps, shadows.generation());
        shadows.go_on_watching(&asked);
        assert_eq!((steps(&shadows), shadows.generation()), (1, generation));
        shadows.go_on_watching(&strategies(&["topk@0.5/allgather", "lwtopk@0.5/allgather"]));
        assert_eq!((steps(&shadows), shadows.generation()), (0, generation + 1));
        assert!(shadows.observe(0, &bucket, &[1.0]).is_err());
        assert!(!shadows.under_way(), "what fails is dropped");
    }
}
