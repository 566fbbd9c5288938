//! The published layout of the tuner interface, versions 2 to 7: `src/include/plugin/tuner/tuner_vN.h` of NCCL.
//!
//! | version | loaded by NCCL | differs from the one before |
//! |---|---|---|
//! | 2 | 2.21 | |
//! | 3 | 2.22, 2.23 | a cost table instead of two results |
//! | 4 | 2.24 to 2.27 | `regBuff` |
//! | 5 | 2.28, 2.29 | `init` has another order and three arguments more; `destroy` is called `finalize` |
//! | 6 | 2.30.3 to 2.32.3 | `getChunkSize`, which may be null |
//! | 7 | 2.32.6 | constants for one more generation of GPUs |
//!
//! NCCL looks for the newest that it knows first, down to 2 (the binaries of 2.30.7 and 2.32.3 name 2 to 6). Constants and NVLink domains pass as opaque pointers: this plugin
//! neither reads nor changes them, so it does not depend on their layout.

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// `ncclResult_t`; 0 is success.
pub type NcclResult = c_int;

/// `ncclDebugLogger_t`: level, subsystems, file, line, format.
pub type LogFunction = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// `init` up to version 4: ranks, nodes, logger; gives a context.
pub type InitV2 = unsafe extern "C" fn(usize, usize, Option<LogFunction>, *mut *mut c_void) -> NcclResult;

/// `init` from version 5 on: gives a context; communicator, ranks, nodes, logger, NVLink domains, constants.
pub type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    usize,
    usize,
    Option<LogFunction>,
    *mut c_void,
    *mut c_void,
) -> NcclResult;

/// `getCollInfo` of version 2: context, function, bytes, CollNet, NVLS, pipelined operations; gives algorithm,
/// protocol, channels.
pub type InfoV2 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    c_int,
    c_int,
    *mut c_int,
    *mut c_int,
    *mut c_int,
) -> NcclResult;

/// `getCollInfo` of version 3: context, function, bytes, pipelined operations, costs, their algorithms, their
/// protocols; gives channels. The costs are passed as `float**` and are one flat row of floats all the same.
pub type InfoV3 =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, *mut *mut f32, c_int, c_int, *mut c_int) -> NcclResult;

/// `getCollInfo` from version 4 on: as 3, with whether buffers can be registered before the channels.
pub type InfoV4 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    *mut *mut f32,
    c_int,
    c_int,
    c_int,
    *mut c_int,
) -> NcclResult;

/// `destroy`, `finalize`: context.
pub type Finish = unsafe extern "C" fn(*mut c_void) -> NcclResult;

/// `getChunkSize`: context, function, bytes, algorithm, protocol, channels; changes the chunk's bytes.
pub type ChunkSize = unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, c_int, c_int, *mut usize) -> NcclResult;

/// A tuner up to version 5; `I` is its `init`, `G` its `getCollInfo`.
#[repr(C)]
#[derive(Debug)]
pub struct Tuner<I, G> {
    /// Its name, in NCCL's log.
    pub name: *const c_char,
    /// Once for each communicator.
    pub init: I,
    /// Once for each collective.
    pub info: G,
    /// At the end of each communicator.
    pub finish: Finish,
}

/// A tuner from version 6 on.
#[repr(C)]
#[derive(Debug)]
pub struct ChunkTuner {
    /// What it has in common with version 5.
    pub base: Tuner<InitV5, InfoV4>,
    /// May be null: NCCL's chunk size stands.
    pub chunk_size: Option<ChunkSize>,
}

// SAFETY: the name points to a constant, functions are shared by nature, and nothing is ever written.
unsafe impl<I, G> Sync for Tuner<I, G> {}
// SAFETY: as above.
unsafe impl Sync for ChunkTuner {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, offset_of, size_of};

    #[test]
    fn structs_are_rows_of_pointers_in_the_published_order() {
        const P: usize = size_of::<*const c_void>();
        type V2 = Tuner<InitV2, InfoV2>;
        type V3 = Tuner<InitV2, InfoV3>;
        type V4 = Tuner<InitV2, InfoV4>;
        type V5 = Tuner<InitV5, InfoV4>;
        assert_eq!([size_of::<V2>(), size_of::<V3>(), size_of::<V4>(), size_of::<V5>()], [4 * P; 4]);
        assert_eq!(size_of::<ChunkTuner>(), 5 * P);
        assert_eq!([align_of::<V2>(), align_of::<V5>(), align_of::<ChunkTuner>()], [P; 3]);
        let v2 = [offset_of!(V2, name), offset_of!(V2, init), offset_of!(V2, info), offset_of!(V2, finish)];
        let v5 = [offset_of!(V5, name), offset_of!(V5, init), offset_of!(V5, info), offset_of!(V5, finish)];
        assert_eq!((v2, v5), ([0, P, 2 * P, 3 * P], [0, P, 2 * P, 3 * P]));
        assert_eq!((offset_of!(ChunkTuner, base), offset_of!(ChunkTuner, chunk_size)), (0, 4 * P));
        // A null function pointer is what an absent option is.
        assert_eq!(size_of::<Option<ChunkSize>>(), P);
        assert_eq!(size_of::<Option<LogFunction>>(), P);
    }
}
