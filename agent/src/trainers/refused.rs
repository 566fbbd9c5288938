//! Runs that the controller refuses, so that it is asked again about each now and then, whatever their trainers do.

use flexcomm_domain::{JobId, RunId};
use flexcomm_wire::{Hello, RefusedRun};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// From a refusal to the next question about the run.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// While one rank asks, the others of its run are refused for so long: the controller's answer comes back in far less.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Most runs that are remembered: a few jobs' worth.
pub(super) const MAX_REFUSED: usize = 64;

#[derive(Debug)]
struct Refusal {
    reason: String,
    until: Instant,
}

/// By job and run.
#[derive(Debug, Default)]
pub(super) struct Refused(BTreeMap<(JobId, RunId), Refusal>);

impl Refused {
    /// The controller refuses a run.
    pub(super) fn add(&mut self, run: RefusedRun, now: Instant) {
        let key = (run.job, run.run);
        if self.0.len() >= MAX_REFUSED && !self.0.contains_key(&key) {
            let oldest = self.0.iter().min_by_key(|(_, refusal)| refusal.until).map(|(key, _)| key.clone());
            oldest.and_then(|key| self.0.remove(&key));
        }
        self.0.insert(key, Refusal { reason: run.reason, until: now + ASK_AGAIN });
    }

    /// Whether a rank may join, and so ask the controller about its run; `is_here` when another rank of the run has asked
    /// and is still connected.
    pub(super) fn check(&mut self, seen: &Hello, is_here: bool, now: Instant) -> Result<(), String> {
        let Some(key) = seen.run.map(|run| (seen.job.clone(), run)) else { return Ok(()) };
        match self.0.get_mut(&key) {
            None => {}
            Some(refusal) if now < refusal.until => return Err(refusal.reason.clone()),
            Some(_) if is_here => drop(self.0.remove(&key)),
            Some(refusal) => refusal.until = now + ANSWER_WITHIN,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;

    fn run(number: u64) -> RefusedRun {
        RefusedRun { job: "j".parse().unwrap(), run: RunId(number), reason: format!("reason {number}") }
    }

    fn of(number: u64) -> Hello {
        Hello { run: Some(RunId(number)), ..seen(0, 4) }
    }

    #[test]
    fn one_rank_asks_a_minute_and_the_others_follow_when_it_is_not_refused() {
        let (mut refused, now) = (Refused::default(), Instant::now());
        let at = |s| now + Duration::from_secs(s);
        refused.add(run(1), now);
        assert_eq!(refused.check(&of(1), false, at(59)), Err("reason 1".into()));
        assert_eq!(refused.check(&of(2), false, at(59)), Ok(()), "another run");
        assert_eq!(refused.check(&seen(0, 4), false, at(59)), Ok(()), "a trainer without run ids");
        assert_eq!(refused.check(&of(1), false, at(60)), Ok(()));
        assert_eq!(refused.check(&of(1), true, at(60)), Err("reason 1".into()), "one of its ranks asks");
        assert_eq!(refused.check(&of(1), true, at(70)), Ok(()), "the controller has not refused it again");
        assert_eq!(refused.check(&of(1), true, at(70)), Ok(()));
    }

    #[test]
    fn runs_are_bounded() {
        let (mut refused, now) = (Refused::default(), Instant::now());
        (0..=MAX_REFUSED as u64).for_each(|number| refused.add(run(number), now + Duration::from_millis(number)));
        assert_eq!(refused.0.len(), MAX_REFUSED);
        assert_eq!(refused.check(&of(0), false, now), Ok(()), "the oldest made room");
        assert!(refused.check(&of(1), false, now).is_err());
    }
}
