//! What the process that trains calls; `include/flexcomm_nccl_tuner.h` is this in C.

use super::{REGISTRY, shielded};
use crate::algorithm::Algorithm;
use crate::preference::{COUNTERS, Preference, Scope, asked_here, get, set};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

const DONE: i32 = 0;
const REFUSED: i32 = -1;

/// No preference, where an algorithm is expected.
const NONE: i32 = -1;

/// `flexcomm_tuner_state` of the header. It only ever grows at its end.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// The calling thread's preference: 0 tree, 1 ring, -1 none.
    pub thread_algorithm: i32,
    /// The process's, likewise.
    pub process_algorithm: i32,
    /// Communicators of more than one rank that NCCL has opened with this plugin and not closed.
    pub communicators: u64,
    /// Allreduces that NCCL asked about, since the plugin was loaded.
    pub asked: u64,
    /// Of these, by the calling thread.
    pub asked_here: u64,
    /// Allreduces that NCCL would have run otherwise.
    pub steered: u64,
    /// Allreduces that NCCL would have run as preferred anyway.
    pub same: u64,
    /// Allreduces that NCCL ran as it chose although something was preferred; the log says why.
    pub left: u64,
}

/// `scope` 0: for allreduces that the calling thread enqueues from now on; 1: for those of all threads that have no
/// preference of their own. `algorithm` 0 tree, 1 ring, -1 none. `step` is the training step, for the log. Answers 0,
/// or -1 when an argument is none of these, and then nothing has changed.
#[unsafe(no_mangle)]
pub extern "C" fn flexcomm_tuner_prefer(scope: i32, algorithm: i32, step: u64) -> i32 {
    shielded(REFUSED, || {
        let scope = match scope {
            0 => Scope::Thread,
            1 => Scope::Process,
            _ => return REFUSED,
        };
        let preference = Algorithm::from_number(algorithm).map(|algorithm| Preference { algorithm, step });
        if preference.is_none() && algorithm != NONE {
            return REFUSED;
        }
        set(scope, preference);
        DONE
    })
}

/// Writes the state, or as much of it as `bytes` hold. Answers how many bytes the whole has, or -1 when `out` is null.
///
/// # Safety
/// `out` is null or `bytes` long.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexcomm_tuner_state(out: *mut c_void, bytes: usize) -> i32 {
    shielded(REFUSED, || {
        if out.is_null() {
            return REFUSED;
        }
        let state = state();
        let whole = size_of::<State>();
        // SAFETY: `out` is as long as the caller says, and the state is plain numbers without gaps.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const state).cast::<u8>(), out.cast::<u8>(), whole.min(bytes));
        }
        whole as i32
    })
}

fn state() -> State {
    let number = |scope| get(scope).map_or(NONE, |p| p.algorithm.number() as i32);
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    State {
        thread_algorithm: number(Scope::Thread),
        process_algorithm: number(Scope::Process),
        communicators: REGISTRY.steerable() as u64,
        asked: count(&COUNTERS.asked),
        asked_here: asked_here(),
        steered: count(&COUNTERS.steered),
        same: count(&COUNTERS.same),
        left: count(&COUNTERS.left),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn the_state_has_the_headers_layout_and_no_gaps() {
        assert_eq!(size_of::<State>(), 56);
        assert_eq!((offset_of!(State, process_algorithm), offset_of!(State, communicators)), (4, 8));
        assert_eq!((offset_of!(State, asked), offset_of!(State, left)), (16, 48));
    }

    #[test]
    fn what_is_not_known_changes_nothing() {
        assert_eq!(flexcomm_tuner_prefer(0, 0, 3), DONE);
        for (scope, algorithm) in [(2, 0), (-1, 0), (0, 2), (0, -2), (0, i32::MAX)] {
            assert_eq!(flexcomm_tuner_prefer(scope, algorithm, 3), REFUSED);
        }
        assert_eq!(state().thread_algorithm, 0);
        assert_eq!(flexcomm_tuner_prefer(0, NONE, 3), DONE);
        assert_eq!(state().thread_algorithm, NONE);
    }

    #[test]
    fn a_caller_of_another_age_gets_what_it_has_room_for() {
        let mut room = [0xaa_u8; 80];
        // SAFETY: null is allowed.
        assert_eq!(unsafe { flexcomm_tuner_state(std::ptr::null_mut(), 8) }, REFUSED);
        // SAFETY: the room is longer than 8 bytes, and than 80 in the second call.
        assert_eq!(unsafe { flexcomm_tuner_state(room.as_mut_ptr().cast(), 8) }, 56);
        assert_eq!((&room[..4], &room[8..10]), (&[0xff; 4][..], &[0xaa; 2][..]));
        // SAFETY: as above.
        assert_eq!(unsafe { flexcomm_tuner_state(room.as_mut_ptr().cast(), 80) }, 56);
        assert_eq!(&room[56..], [0xaa; 24]);
    }
}
