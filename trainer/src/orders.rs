//! A job's newest orders, between the thread that reads the agent's socket and the one that trains. To ask whether there
//! are new ones costs the latter one atomic load. What is not valid is rejected with a line in the log, and training
//! goes on as before.

use crate::agreement::{Agreement, Offer};
use crate::message::TrialPlan;
use flexcomm_domain::{Decision, Invalid, JobId, RunId, Strategy};
use flexcomm_wire::{JobOrders, TrialOrder};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Valid orders that were not there at the last look.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct News {
    /// The decision that should be in force. May repeat or go backwards: the agreement fences it.
    pub decision: Option<Decision>,
    /// The trial that should run. The agreement runs each once.
    pub trial: Option<TrialPlan>,
}

/// The newest orders of one run of a job; those that were not taken before newer ones came are lost, as they should be.
#[derive(Debug)]
pub struct OrdersSlot {
    job: JobId,
    run: Option<RunId>,
    /// Whether `newest` was not taken yet; changes only while that is locked.
    fresh: AtomicBool,
    newest: Mutex<News>,
    rejected: AtomicU64,
}

impl OrdersSlot {
    /// Empty. What was decided for another run than `run` will not be followed.
    pub fn new(job: JobId, run: Option<RunId>) -> Self {
        let (fresh, newest) = (AtomicBool::new(false), Mutex::default());
        Self { job, run, fresh, newest, rejected: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, News> {
        // A panic while the lock is held leaves plain data behind.
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has changed since the last call: one atomic load where nothing has.
    #[inline]
    pub fn poll(&self) -> Option<News> {
        if !self.fresh.load(Ordering::Acquire) {
            return None;
        }
        let mut newest = self.lock();
        self.fresh.store(false, Ordering::Relaxed);
        Some(std::mem::take(&mut *newest))
    }

    /// Offers to rank 0's agreement what has changed since the last call: trials and, if these are followed, decisions. Other ranks
    /// do nothing: only rank 0's orders count. Candidates that this trainer cannot run are left out; a decision is answered
    /// of whose plan it cannot run some strategy, or that [`flexcomm_domain::Plan::mixes_momentum`].
    pub fn offer(&self, agreement: &mut Agreement, follow: bool, runs: impl Fn(&Strategy) -> bool) -> Option<Decision> {
        if !agreement.leads() {
            return None;
        }
        let news = self.poll()?;
        if let Some(mut plan) = news.trial {
            plan.candidates.retain(&runs);
            if !plan.candidates.is_empty() {
                agreement.offer_trial(plan);
            }
        }
        let decision = news.decision.filter(|_| follow)?;
        if decision.plan.mixes_momentum() {
            tracing::warn!(version = %decision.version, plan = %decision.plan,
                "some buckets' memories have a momentum in place of the optimizer's, others have none, and the optimizer has one \
                 momentum for all; the decision is not followed");
            return Some(decision);
        }
        if !decision.plan.strategies().iter().all(runs) {
            return Some(decision);
        }
        if agreement.offer_decision(decision.version, decision.plan.clone()) == Offer::Conflict {
            tracing::warn!(version = %decision.version, plan = %decision.plan,
                "another plan is known under this version; it is not followed");
        }
        None
    }

    /// How many orders were not valid so far.
    pub fn rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    /// Checks orders and replaces those of before by what is valid of them.
    pub fn put(&self, orders: &JobOrders) {
        if orders.job != self.job {
            return self.reject(&format_args!("they are for job {}, this is job {}", orders.job, self.job));
        }
        let decision = orders.decision.as_ref().filter(|d| self.is_ours(d.run)).map(|d| d.to_decision(&self.job));
        let trial = orders.trial.as_ref().filter(|t| self.is_ours(t.run)).map(to_plan);
        let news = News { decision: self.valid(decision), trial: self.valid(trial) };
        let mut newest = self.lock();
        *newest = news;
        self.fresh.store(true, Ordering::Release);
    }

    /// Whether orders are for this run; those without a run are of a controller older than run ids.
    fn is_ours(&self, run: Option<RunId>) -> bool {
        run.is_none() || self.run.is_none() || run == self.run
    }

    fn valid<T>(&self, part: Option<Result<T, Invalid>>) -> Option<T> {
        part?.inspect_err(|error| self.reject(error)).ok()
    }

    /// Counts orders, or a part of them, that cannot be followed.
    pub(crate) fn reject(&self, why: &dyn std::fmt::Display) {
        self.rejected.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(job = %self.job, %why, "orders are not valid and are rejected; training goes on as before");
    }
}

fn to_plan(order: &TrialOrder) -> Result<TrialPlan, Invalid> {
    let candidates = order.candidates.iter().map(Strategy::try_from).collect::<Result<_, _>>()?;
    TrialPlan::new(order.id, candidates, order.iterations, order.budget_ms)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::message::Announced;
    use flexcomm_domain::{Rank, Timestamp, Version};
    use flexcomm_wire::DecisionOrder;

    pub(crate) fn orders(version: u64) -> JobOrders {
        let decision = Decision {
            job: JobId::new("j").unwrap(),
            version: Version(version),
            parent: Version(0),
            plan: "topk@0.1/allgather".parse().unwrap(),
            decided_at: Timestamp(0),
            reason: String::new(),
        };
        let job = decision.job.clone();
        JobOrders { job, decision: Some(DecisionOrder::from(&decision)), trial: None }
    }

    fn slot(run: Option<RunId>) -> OrdersSlot {
        OrdersSlot::new(JobId::new("j").unwrap(), run)
    }

    pub(crate) fn version(news: Option<News>) -> Option<u64> {
        news.and_then(|n| n.decision).map(|d| d.version.0)
    }

    #[test]
    fn news_come_once_and_bad_ones_never() {
        let slot = slot(None);
        assert_eq!(slot.poll(), None);
        slot.put(&orders(1));
        assert_eq!(version(slot.poll()), Some(1));
        assert_eq!(slot.poll(), None);

        let mut forged = orders(2);
        forged.decision.as_mut().unwrap().strategy.0 = "topk(k=0.5)+ef(vanilla)/allgather".into();
        slot.put(&forged);
        assert_eq!(version(slot.poll()), None);
        slot.put(&orders(3));
        slot.put(&JobOrders { job: JobId::new("other").unwrap(), ..orders(4) });
        assert_eq!(version(slot.poll()), Some(3), "another job's orders replace none of ours");
        assert_eq!(slot.rejected(), 2);
        slot.put(&orders(5));
        slot.put(&orders(6));
        assert_eq!((version(slot.poll()), slot.poll()), (Some(6), None), "the newest count");
    }

    /// The agent keeps the orders of the run before until those of this one arrive.
    #[test]
    fn orders_of_another_run_are_not_followed() {
        let slot = slot(Some(RunId(2)));
        for (run, version, followed) in [(Some(RunId(1)), 5, None), (Some(RunId(2)), 6, Some(6)), (None, 7, Some(7))] {
            let mut given = orders(version);
            given.decision.as_mut().unwrap().run = run;
            let candidates = vec![Strategy::DENSE_RING.into()];
            given.trial = Some(TrialOrder { run, id: version, candidates, iterations: 10, budget_ms: 100 });
            slot.put(&given);
            let news = slot.poll().unwrap();
            assert_eq!(news.trial.map(|t| t.id), followed, "{run:?}");
            assert_eq!(news.decision.map(|d| d.version.0), followed, "{run:?}");
        }
        assert_eq!(slot.rejected(), 0, "it is no fault");
    }

    #[test]
    fn a_valid_trial_survives_a_bad_decision() {
        let slot = slot(None);
        let mut both = orders(1);
        both.decision.as_mut().unwrap().digest ^= 1;
        let candidates = vec![Strategy::DENSE_RING.into()];
        both.trial = Some(TrialOrder { run: None, id: 3, candidates, iterations: 10, budget_ms: 100 });
        slot.put(&both);
        let news = slot.poll().unwrap();
        assert_eq!((news.decision, news.trial.unwrap().id), (None, 3));
        both.trial.as_mut().unwrap().iterations = 0;
        slot.put(&both);
        assert_eq!(slot.poll(), Some(News::default()));
        assert_eq!(slot.rejected(), 3);
    }

    fn tried(version: u64, candidates: &[&str]) -> JobOrders {
        let candidates = candidates.iter().map(|text| text.parse::<Strategy>().unwrap().into()).collect();
        let trial = TrialOrder { run: None, id: version, candidates, iterations: 10, budget_ms: 100 };
        JobOrders { trial: Some(trial), ..orders(version) }
    }

    /// What is announced next, one after the other.
    fn announced(agreement: &mut Agreement) -> Vec<Announced> {
        std::iter::from_fn(|| {
            agreement.begin(true);
            agreement.take_announced()
        })
        .collect()
    }

    #[test]
    fn only_rank_0_offers_and_other_ranks_leave_the_orders_where_they_are() {
        let slot = slot(None);
        slot.put(&tried(1, &["topk@0.1/allgather"]));
        let mut other = Agreement::new(Rank(1), Strategy::DENSE_RING, 0);
        assert_eq!(slot.offer(&mut other, true, |_| true), None);
        assert_eq!(announced(&mut other), []);
        assert!(slot.poll().is_some());
    }

    #[test]
    fn trials_are_offered_also_where_decisions_are_not_followed() {
        let only_trial = [Announced::Trial(plan(&tried(1, &["topk@0.1/allgather"])))];
        let decision = orders(1).decision.unwrap().to_decision(&orders(1).job).unwrap();
        let both = [Announced::Decision { version: decision.version, plan: decision.plan }, only_trial[0].clone()];
        for (follow, expected) in [(false, &only_trial[..]), (true, &both[..])] {
            let (slot, mut agreement) = (slot(None), Agreement::new(Rank(0), Strategy::DENSE_RING, 0));
            slot.put(&tried(1, &["topk@0.1/allgather"]));
            assert_eq!(slot.offer(&mut agreement, follow, |_| true), None);
            assert_eq!(announced(&mut agreement), expected, "follow = {follow}");
        }
    }

    #[test]
    fn candidates_that_do_not_run_are_dropped_and_a_decision_that_does_not_is_answered() {
        let (slot, mut agreement) = (slot(None), Agreement::new(Rank(0), Strategy::DENSE_RING, 0));
        let is_dense = |strategy: &Strategy| strategy.is_dense();
        slot.put(&tried(1, &["topk@0.1/allgather", "none/dense-ring"]));
        let refused = slot.offer(&mut agreement, true, is_dense).map(|decision| decision.version);
        assert_eq!(refused, Some(Version(1)));
        assert_eq!(announced(&mut agreement), [Announced::Trial(plan(&tried(1, &["none/dense-ring"])))]);
        slot.put(&tried(2, &["topk@0.1/allgather"]));
        assert_eq!(slot.offer(&mut agreement, false, is_dense), None, "what is not followed is not refused");
        assert_eq!(announced(&mut agreement), [], "no candidate is left");
        assert_eq!(slot.offer(&mut agreement, true, is_dense), None, "each is answered once");
    }

    #[test]
    fn a_plan_runs_where_all_its_strategies_do_and_agree_on_the_momentum() {
        let dense = "none/dense-ring";
        let [sparse, dgc] = ["topk(k=0.01)+ef(vanilla)/allgather", "topk(k=0.01)+ef(dgc,mu=0.9)/allgather"];
        let no_sparse = |strategy: &Strategy| !strategy.to_string().starts_with(sparse);
        for (version, (plan, runs)) in (1..).zip([
            (format!("{dense} | {sparse}"), false),
            (format!("{dense} | fp16/dense-ring"), true),
            (format!("{dense} | {dgc}"), false),
            (dgc.to_owned(), true),
        ]) {
            let (slot, mut agreement) = (slot(None), Agreement::new(Rank(0), Strategy::DENSE_RING, 0));
            let mut decision = orders(version).decision.unwrap().to_decision(&orders(version).job).unwrap();
            decision.plan = plan.parse().unwrap();
            slot.put(&JobOrders { decision: Some(DecisionOrder::from(&decision)), ..orders(version) });
            let refused = slot.offer(&mut agreement, true, no_sparse).map(|decision| decision.version);
            assert_eq!(refused, (!runs).then_some(Version(version)), "{plan}");
            assert_eq!(announced(&mut agreement).len(), usize::from(runs), "{plan}");
        }
    }

    fn plan(orders: &JobOrders) -> TrialPlan {
        to_plan(orders.trial.as_ref().unwrap()).unwrap()
    }

    /// The thread that trains looks while the other one puts.
    #[test]
    fn versions_that_are_put_one_after_the_other_are_seen_in_order_up_to_the_last() {
        const LAST: u64 = 20_000;
        let slot = slot(None);
        std::thread::scope(|scope| {
            scope.spawn(|| (1..=LAST).for_each(|version| slot.put(&orders(version))));
            let mut seen = 0;
            while seen < LAST {
                let Some(next) = version(slot.poll()) else { continue };
                assert!(next > seen, "{next} after {seen}");
                seen = next;
            }
        });
        assert_eq!(slot.poll(), None);
    }
}
