//! NCCL's communicators that this plugin was asked to tune. NCCL keeps the handle that [`open`] gives; a handle is a
//! number and never an address, so that one that is unknown is found out and not followed.

use crate::algorithm::Algorithm;
use crate::preference::{COUNTERS, Preference};
use crate::table::Outcome;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// What NCCL says when it makes a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Version of the interface through which NCCL speaks.
    pub interface: u32,
    /// Ranks of the communicator.
    pub ranks: usize,
    /// Nodes of the communicator.
    pub nodes: usize,
    /// Whether `NCCL_ALGO` or `NCCL_PROTO` is set: interface 2 has no table in which that could be seen.
    pub fixed: bool,
}

/// How loud a line is, by NCCL's measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// `NCCL_LOG_WARN`.
    Warn,
    /// `NCCL_LOG_INFO`.
    Info,
}

/// Where lines go. `L` is NCCL's logger.
#[derive(Debug)]
pub struct Communicator<L> {
    /// As NCCL said.
    pub facts: Facts,
    /// As NCCL passed it.
    pub logger: L,
    /// What was said about preferences, see [`Communicator::is_news`].
    logged: AtomicU8,
}

impl<L> Communicator<L> {
    /// A communicator about which nothing was said yet.
    pub fn new(facts: Facts, logger: L) -> Self {
        Self { facts, logger, logged: AtomicU8::new(0) }
    }

    /// Counts what became of a preference, and says each kind of outcome once until another shape is preferred.
    pub fn line(&self, preference: Preference, outcome: Outcome) -> Option<(Level, String)> {
        let Preference { algorithm, step } = preference;
        let (counter, kind) = match outcome {
            Outcome::Steered { .. } => (&COUNTERS.steered, 0),
            Outcome::Same => (&COUNTERS.same, 0),
            Outcome::Offloaded => (&COUNTERS.left, 1),
            Outcome::Forbidden => (&COUNTERS.left, 2),
            Outcome::Unusable(_) => (&COUNTERS.left, 3),
        };
        counter.fetch_add(1, Ordering::Relaxed);
        if !self.is_news(algorithm, kind) {
            return None;
        }
        let stands = "NCCL's own choice stands";
        Some(match outcome {
            Outcome::Steered { .. } | Outcome::Same => {
                (Level::Info, format!("allreduce by {algorithm} from step {step} on"))
            }
            Outcome::Offloaded => (
                Level::Info,
                format!("step {step} prefers {algorithm}, but NCCL reduces in the switch or in the network; {stands}"),
            ),
            Outcome::Forbidden => (
                Level::Warn,
                format!(
                    "step {step} prefers {algorithm}, which NCCL does not allow here (is NCCL_ALGO set?); {stands}"
                ),
            ),
            Outcome::Unusable(error) => (Level::Warn, format!("failed to prefer {algorithm}: {error}; {stands}")),
        })
    }

    /// Whether this kind (0 to 3) was not said yet since the preferred shape changed: the lowest two bits are the shape
    /// and 1, one bit for each kind above. Buckets of one step may have different outcomes, by their size.
    fn is_news(&self, algorithm: Algorithm, kind: u8) -> bool {
        let (shape, bit) = (algorithm.number() as u8 + 1, 4 << kind);
        let add = |logged: u8| if logged & 3 == shape { logged | bit } else { shape | bit };
        let logged = self.logged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |logged| Some(add(logged)));
        logged.is_ok_and(|before| before != add(before))
    }
}

/// Communicators by handle.
#[derive(Debug)]
pub struct Registry<L> {
    open: RwLock<BTreeMap<usize, Arc<Communicator<L>>>>,
    next: AtomicUsize,
}

impl<L> Registry<L> {
    /// Without any.
    pub const fn new() -> Self {
        // 0 is no handle: NCCL's pointer would be null.
        Self { open: RwLock::new(BTreeMap::new()), next: AtomicUsize::new(1) }
    }

    /// Takes one in and gives its handle.
    pub fn open(&self, communicator: Communicator<L>) -> usize {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        open.insert(handle, Arc::new(communicator));
        handle
    }

    /// The one with this handle.
    pub fn find(&self, handle: usize) -> Option<Arc<Communicator<L>>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned()
    }

    /// Forgets one.
    pub fn close(&self, handle: usize) -> Option<Arc<Communicator<L>>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&handle)
    }

    /// How many are open that have more than one rank: NCCL does not ask about others.
    pub fn steerable(&self) -> usize {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.values().filter(|communicator| communicator.facts.ranks > 1).count()
    }
}

impl<L> Default for Registry<L> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::TableError;

    fn communicator(ranks: usize) -> Communicator<()> {
        Communicator::new(Facts { interface: 5, ranks, nodes: 2, fixed: false }, ())
    }

    #[test]
    fn handles_are_never_null_and_never_come_back() {
        let registry = Registry::new();
        let (a, b) = (registry.open(communicator(4)), registry.open(communicator(1)));
        assert!(a != 0 && b != 0 && a != b);
        assert_eq!((registry.steerable(), registry.find(a).unwrap().facts.ranks), (1, 4));
        assert!(registry.find(0).is_none() && registry.find(usize::MAX).is_none());
        assert!(registry.close(a).is_some());
        assert!(registry.close(a).is_none() && registry.find(a).is_none(), "twice is survived");
        assert!(registry.open(communicator(2)) > b);
    }

    #[test]
    fn each_change_is_said_once() {
        let communicator = communicator(2);
        let prefer = |algorithm, step| Preference { algorithm, step };
        let say = |p, outcome| communicator.line(p, outcome).map(|(_, text)| text);
        let tree = prefer(Algorithm::Tree, 7);
        let steered = Outcome::Steered { algorithm: 0, protocol: 2 };
        assert_eq!(say(tree, steered).as_deref(), Some("allreduce by tree from step 7 on"));
        assert_eq!(say(prefer(Algorithm::Tree, 8), steered), None);
        assert_eq!(say(prefer(Algorithm::Tree, 8), Outcome::Same), None, "another bucket, the same shape");
        assert!(say(prefer(Algorithm::Ring, 9), Outcome::Same).unwrap().contains("ring from step 9"));
        let (level, text) = communicator.line(tree, Outcome::Forbidden).unwrap();
        assert_eq!(level, Level::Warn);
        assert!(text.contains("NCCL_ALGO") && text.contains("stands"), "{text}");
        assert_eq!(say(tree, Outcome::Forbidden), None);
        // Buckets of different sizes take turns within every step.
        assert!(say(tree, Outcome::Offloaded).is_some());
        assert_eq!((say(tree, Outcome::Forbidden), say(tree, Outcome::Offloaded)), (None, None));
        let missing = say(tree, Outcome::Unusable(TableError::Missing)).unwrap();
        assert!(missing.contains("failed to prefer tree") && missing.contains("no cost table"), "{missing}");
    }
}
