//! What a job runs: a strategy for each bucket of its gradient.

use crate::spec::MemoryKind;
use crate::{Digest, Invalid, Strategy, strategy_text};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Most buckets that a plan tells apart.
pub const MAX_BUCKETS: usize = 60;

/// Most bytes of a plan's canonical text.
pub const MAX_PLAN_TEXT: usize = 3000;

/// A strategy for each bucket, in the order of backward; the last one is also for all buckets behind.
///
/// Its canonical text is the strategies' with ` | ` between them, where one is for several buckets in turn with their number before
/// it: `2x none/dense-ring | topk(k=0.01)+ef(vanilla)/allgather`. A plan of one strategy for all buckets has that strategy's text and
/// digest.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Plan(Kind);

#[expect(clippy::large_enum_variant, reason = "most plans are of one strategy, and a box could be no constant")]
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Alike(Strategy),
    /// Two strategies or more, of which the last differs from the one before.
    ByBucket(Arc<[Strategy]>),
}

impl Plan {
    /// Before anything is decided: dense over a ring.
    pub const DENSE_RING: Self = Self(Kind::Alike(Strategy::DENSE_RING));

    /// By bucket. Refuses none, more than [`MAX_BUCKETS`], and what has more than [`MAX_PLAN_TEXT`] characters.
    pub fn by_bucket(strategies: &[Strategy]) -> Result<Self, Invalid> {
        let Some((last, before)) = strategies.split_last() else {
            return Err(Invalid::Combination("a plan without a strategy".into()));
        };
        // The last one is for all further buckets, too.
        let Some(differs) = before.iter().rposition(|strategy| strategy != last) else {
            return Ok(Self::from(*last));
        };
        let last = differs + 1;
        if last >= MAX_BUCKETS {
            let (what, value, allowed) = ("number of a plan's buckets", last as f64 + 1.0, "1 to 60".to_owned());
            return Err(Invalid::Range { what, value, allowed });
        }
        let plan = Self(Kind::ByBucket(strategies[..=last].into()));
        let length = plan.to_string().len();
        if length > MAX_PLAN_TEXT {
            return Err(Invalid::Combination(format!(
                "a plan of {length} characters, allowed are {MAX_PLAN_TEXT}: use fewer different ratios"
            )));
        }
        Ok(plan)
    }

    /// The strategy of a bucket.
    pub fn of(&self, bucket: usize) -> &Strategy {
        let all = self.strategies();
        &all[bucket.min(all.len() - 1)]
    }

    /// By bucket; the last one is for all further ones. Never empty.
    pub fn strategies(&self) -> &[Strategy] {
        match &self.0 {
            Kind::Alike(strategy) => std::slice::from_ref(strategy),
            Kind::ByBucket(strategies) => strategies,
        }
    }

    /// The one strategy of all buckets; none where they differ.
    pub fn alike(&self) -> Option<&Strategy> {
        match &self.0 {
            Kind::Alike(strategy) => Some(strategy),
            Kind::ByBucket(_) => None,
        }
    }

    /// The last bucket's strategy: backward never hides its exchange, so nowhere does more depend on it.
    pub fn last(&self) -> &Strategy {
        self.of(usize::MAX)
    }

    /// Whether nothing is compressed in any bucket.
    pub fn is_dense(&self) -> bool {
        self.strategies().iter().all(Strategy::is_dense)
    }

    /// Whether some buckets' error feedback has a momentum of its own, which takes the place of the optimizer's, and others' has none. The
    /// optimizer has one momentum for all buckets, so no trainer can run such a plan.
    pub fn mixes_momentum(&self) -> bool {
        let own = |strategy: &Strategy| strategy.spec().memory().is_some_and(|(kind, _)| kind == MemoryKind::Dgc);
        self.strategies().iter().any(own) && !self.strategies().iter().all(own)
    }

    /// Digest of the canonical text.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.to_string())
    }

    /// Strategies, each with the number of buckets in turn that it is for.
    pub fn runs(&self) -> impl Iterator<Item = (usize, &Strategy)> {
        self.strategies().chunk_by(|a, b| a == b).map(|run| (run.len(), &run[0]))
    }
}

impl From<Strategy> for Plan {
    fn from(strategy: Strategy) -> Self {
        Self(Kind::Alike(strategy))
    }
}

impl PartialEq<Strategy> for Plan {
    fn eq(&self, other: &Strategy) -> bool {
        self.alike() == Some(other)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (buckets, strategy)) in self.runs().enumerate() {
            let between = if at > 0 { " | " } else { "" };
            match buckets {
                1 => write!(f, "{between}{strategy}")?,
                n => write!(f, "{between}{n}x {strategy}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Plan {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let mut strategies = Vec::new();
        for part in text.split('|').map(str::trim) {
            let counted = part.split_once("x ").and_then(|(n, rest)| Some((n.parse::<usize>().ok()?, rest)));
            let (buckets, strategy) = counted.unwrap_or((1, part));
            if !(1..=MAX_BUCKETS).contains(&buckets) {
                let (what, value, allowed) = ("number of a plan's buckets", buckets as f64, "1 to 60".to_owned());
                return Err(Invalid::Range { what, value, allowed });
            }
            let strategy: Strategy = strategy.trim().parse()?;
            strategies.extend(std::iter::repeat_n(strategy, buckets));
            // What is for all further buckets may be written for more than there is room for.
            if strategies.len() > 2 * MAX_BUCKETS {
                let (what, value) = ("number of a plan's buckets", strategies.len() as f64);
                return Err(Invalid::Range { what, value, allowed: "1 to 60".to_owned() });
            }
        }
        Self::by_bucket(&strategies)
    }
}

impl<'de> Deserialize<'de> for Plan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        strategy_text(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Serialize for Plan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop, prop_assert_eq, proptest};

    const SPARSE: &str = "topk(k=0.01)+ef(vanilla)/allgather";

    #[test]
    fn one_strategy_for_all_is_that_strategy() {
        let strategy: Strategy = SPARSE.parse().unwrap();
        let plan: Plan = SPARSE.parse().unwrap();
        assert_eq!((plan.digest(), plan.to_string().as_str()), (strategy.digest(), SPARSE));
        assert_eq!(plan, Plan::by_bucket(&[strategy; 7]).unwrap());
        assert_eq!((plan.alike(), plan.of(59)), (Some(&strategy), &strategy));
    }

    #[test]
    fn the_last_strategy_is_for_all_further_buckets() {
        let text = format!("2x none/dense-ring | {SPARSE}");
        let plan: Plan = text.parse().unwrap();
        assert_eq!(plan.to_string(), text);
        assert_eq!(format!("2x none/dense-ring|3x {SPARSE}").parse::<Plan>().unwrap(), plan);
        assert!(plan.of(1).is_dense() && !plan.of(2).is_dense() && !plan.of(9).is_dense() && !plan.is_dense());
    }

    #[test]
    fn what_is_no_plan_says_why() {
        let long = format!("{} | {SPARSE}", ["none/dense-ring"; 60].join("|"));
        for (bad, why) in [
            (["60x none"; 4].join("|").as_str(), "1 to 60"),
            ("", "strategy"),
            ("0x none/dense-ring", "1 to 60"),
            ("61x none/dense-ring", "1 to 60"),
            (&long, "1 to 60"),
        ] {
            let error = bad.parse::<Plan>().unwrap_err().to_string();
            assert!(error.contains(why), "{bad}: {error}");
        }
        let many = (1..=60).map(|i| format!("topk(k=0.0{i:02}34567890123)+ef(vanilla)/art-ring:star"));
        let error = many.collect::<Vec<_>>().join("|").parse::<Plan>().unwrap_err().to_string();
        assert!(error.contains("fewer different ratios"), "{error}");
    }

    proptest! {
        #[test]
        fn texts_round_trip(of in prop::collection::vec(0usize..3, 1..=MAX_BUCKETS)) {
            let some = ["none/dense-ring", SPARSE, "powersgd(rank=2)+ef(vanilla)/dense-ring"].map(|s| s.parse().unwrap());
            let strategies: Vec<Strategy> = of.iter().map(|i| some[*i]).collect();
            let plan = Plan::by_bucket(&strategies).unwrap();
            prop_assert_eq!(&plan.to_string().parse::<Plan>().unwrap(), &plan);
            for (bucket, strategy) in strategies.iter().enumerate() {
                prop_assert_eq!(plan.of(bucket), strategy);
            }
        }
    }
}
