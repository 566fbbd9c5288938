//! What the process that trains prefers, and what became of it.
//!
//! Two words, each one number, read without a lock. The thread's own word counts for the collectives that this thread
//! enqueues; a thread without one follows the process's. The thread's word is the exact one: it is set around the
//! gradients' allreduce with the strategy of the step that is under way, so nothing else in the process is touched and
//! no clock or message can come between. The process's word is for communicators whose collectives NCCL prepares
//! on a thread of its own (non-blocking ones).

use crate::algorithm::Algorithm;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whose word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Of the calling thread.
    Thread,
    /// Of the process.
    Process,
}

/// A wish for the allreduces to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preference {
    /// Of which shape.
    pub algorithm: Algorithm,
    /// The training step for which the ranks agreed on it; for the log.
    pub step: u64,
}

/// Steps above are cut: 62 bits are left beside the algorithm.
pub const MOST_STEP: u64 = (1 << 62) - 1;

/// A preference in one word: the step above, the algorithm in the lowest two bits, where 0 is no preference.
fn pack(preference: Option<Preference>) -> u64 {
    let Some(Preference { algorithm, step }) = preference else { return 0 };
    step.min(MOST_STEP) << 2 | (algorithm.number() as u64 + 1)
}

fn unpack(word: u64) -> Option<Preference> {
    let number = i32::try_from(word & 3).ok()? - 1;
    Some(Preference { algorithm: Algorithm::from_number(number)?, step: word >> 2 })
}

static PROCESS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    // Constants without destructors: nothing keeps the library from being unloaded.
    static THREAD: Cell<u64> = const { Cell::new(0) };
    static ASKED_HERE: Cell<u64> = const { Cell::new(0) };
}

/// Replaces a word.
pub fn set(scope: Scope, preference: Option<Preference>) {
    let word = pack(preference);
    match scope {
        // A thread that is being taken down asks NCCL nothing more.
        Scope::Thread => THREAD.try_with(|own| own.set(word)).unwrap_or(()),
        Scope::Process => PROCESS.store(word, Ordering::Release),
    }
}

/// A word as it stands.
pub fn get(scope: Scope) -> Option<Preference> {
    unpack(match scope {
        Scope::Thread => THREAD.try_with(Cell::get).unwrap_or(0),
        Scope::Process => PROCESS.load(Ordering::Acquire),
    })
}

/// What counts for a collective that the calling thread prepares.
pub fn wanted() -> Option<Preference> {
    get(Scope::Thread).or_else(|| get(Scope::Process))
}

/// Allreduces of the whole process since the library was loaded.
#[derive(Debug, Default)]
pub struct Counters {
    /// NCCL asked about.
    pub asked: AtomicU64,
    /// NCCL would have run otherwise.
    pub steered: AtomicU64,
    /// NCCL's own choice was the preferred one.
    pub same: AtomicU64,
    /// Preferred, and left to NCCL all the same.
    pub left: AtomicU64,
}

/// The process's.
pub static COUNTERS: Counters =
    Counters { asked: AtomicU64::new(0), steered: AtomicU64::new(0), same: AtomicU64::new(0), left: AtomicU64::new(0) };

/// Counts a question of NCCL.
pub fn count_asked() {
    COUNTERS.asked.fetch_add(1, Ordering::Relaxed);
    // See `set`.
    let _ = ASKED_HERE.try_with(|asked| asked.set(asked.get() + 1));
}

/// Allreduces that NCCL asked about on the calling thread.
pub fn asked_here() -> u64 {
    ASKED_HERE.try_with(Cell::get).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TREE_5: Preference = Preference { algorithm: Algorithm::Tree, step: 5 };

    proptest! {
        #[test]
        fn words_round_trip(step in 0..=MOST_STEP, tree: bool) {
            let algorithm = if tree { Algorithm::Tree } else { Algorithm::Ring };
            let preference = Some(Preference { algorithm, step });
            prop_assert_eq!(unpack(pack(preference)), preference);
            prop_assert_ne!(pack(preference), 0);
        }

        #[test]
        fn any_word_is_survived(word: u64) {
            let back = unpack(word);
            prop_assert!(back.is_none() || pack(back) == word);
        }
    }

    #[test]
    fn a_step_that_is_too_large_is_cut_and_keeps_the_algorithm() {
        let late = Preference { algorithm: Algorithm::Ring, step: u64::MAX };
        assert_eq!(unpack(pack(Some(late))), Some(Preference { step: MOST_STEP, ..late }));
        assert_eq!(unpack(0), None);
    }

    /// The only test here that touches the words: they are the process's.
    #[test]
    fn a_threads_word_is_its_own_and_goes_before_the_processs() {
        assert_eq!(wanted(), None);
        set(Scope::Thread, Some(TREE_5));
        assert_eq!(wanted(), Some(TREE_5));
        let elsewhere = || std::thread::spawn(|| (wanted(), asked_here())).join().unwrap();
        assert_eq!(elsewhere(), (None, 0));
        let ring = Some(Preference { algorithm: Algorithm::Ring, step: 9 });
        set(Scope::Process, ring);
        assert_eq!((wanted(), elsewhere().0), (Some(TREE_5), ring));
        set(Scope::Thread, None);
        assert_eq!(wanted(), ring);
        set(Scope::Process, None);
        assert_eq!(wanted(), None);
        count_asked();
        assert_eq!((asked_here(), elsewhere().1), (1, 0));
    }
}
