//! What NCCL calls.

use super::layout::{ChunkTuner, InfoV2, InfoV3, InfoV4, InitV2, InitV5, LogFunction, NcclResult, Tuner};
use super::{Logger, REGISTRY, shielded};
use crate::algorithm::{ALL_REDUCE, LL, SIMPLE};
use crate::communicators::{Communicator, Facts, Level};
use crate::preference::{Preference, count_asked, wanted};
use crate::table::{Outcome, TableError, entries, prefer};
use std::ffi::{c_char, c_int, c_void};

const NAME: *const c_char = c"flexcomm".as_ptr();

const SUCCESS: NcclResult = 0;

/// Below this, interface 2 gets the protocol LL, above Simple: both work everywhere, and without a table NCCL's own
/// choice cannot be seen. 32 KiB is about where NCCL leaves LL on small rings.
const LL_BELOW: usize = 32 << 10;

/// Version 2.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclTunerPlugin_v2: Tuner<InitV2, InfoV2> = Tuner { name: NAME, init: init_v2::<2>, info: info_v2, finish };

/// Version 3.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclTunerPlugin_v3: Tuner<InitV2, InfoV3> = Tuner { name: NAME, init: init_v2::<3>, info: info_v3, finish };

/// Version 4.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclTunerPlugin_v4: Tuner<InitV2, InfoV4> = Tuner { name: NAME, init: init_v2::<4>, info: info_v4, finish };

/// Version 5.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclTunerPlugin_v5: Tuner<InitV5, InfoV4> = Tuner { name: NAME, init: init_v5::<5>, info: info_v4, finish };

/// Version 6.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclTunerPlugin_v6: ChunkTuner =
    ChunkTuner { base: Tuner { name: NAME, init: init_v5::<6>, info: info_v4, finish }, chunk_size: None };

/// Version 7.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclTunerPlugin_v7: ChunkTuner =
    ChunkTuner { base: Tuner { name: NAME, init: init_v5::<7>, info: info_v4, finish }, chunk_size: None };

unsafe extern "C" fn init_v2<const INTERFACE: u32>(
    ranks: usize,
    nodes: usize,
    logger: Option<LogFunction>,
    context: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes its logger and a place for the context.
    unsafe { init(INTERFACE, (ranks, nodes), logger, context) }
}

unsafe extern "C" fn init_v5<const INTERFACE: u32>(
    context: *mut *mut c_void,
    _communicator: u64,
    ranks: usize,
    nodes: usize,
    logger: Option<LogFunction>,
    _domains: *mut c_void,
    _constants: *mut c_void,
) -> NcclResult {
    // SAFETY: as in `init_v2`.
    unsafe { init(INTERFACE, (ranks, nodes), logger, context) }
}

/// # Safety
/// `logger` is NCCL's; `context` is null or may be written.
unsafe fn init(
    interface: u32,
    size: (usize, usize),
    logger: Option<LogFunction>,
    context: *mut *mut c_void,
) -> NcclResult {
    shielded(SUCCESS, || {
        // SAFETY: by the contract of this function.
        let logger = unsafe { Logger::new(logger) };
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let fixed = set("NCCL_ALGO") || set("NCCL_PROTO");
        let (ranks, nodes) = size;
        if context.is_null() {
            logger.say(Level::Warn, "NCCL has no place for a tuner's context; NCCL's own choice stands");
            return SUCCESS;
        }
        let facts = Facts { interface, ranks, nodes, fixed };
        let handle = REGISTRY.open(Communicator::new(facts, logger));
        // SAFETY: not null, and by the contract of this function it may be written.
        unsafe { context.write(std::ptr::without_provenance_mut(handle)) };
        let version = env!("CARGO_PKG_VERSION");
        let text = format!("tuner {version}, interface {interface}: {ranks} ranks on {nodes} nodes");
        logger.say(Level::Info, &format!("{text}; ring or tree as the ranks agree, until then as NCCL chooses"));
        SUCCESS
    })
}

unsafe extern "C" fn finish(context: *mut c_void) -> NcclResult {
    shielded(SUCCESS, || {
        // The handle is a number; nothing is read through it.
        REGISTRY.close(context.addr());
        SUCCESS
    })
}

unsafe extern "C" fn info_v2(
    context: *mut c_void,
    function: c_int,
    bytes: usize,
    _collnet: c_int,
    _nvls: c_int,
    _operations: c_int,
    algorithm: *mut c_int,
    protocol: *mut c_int,
    _channels: *mut c_int,
) -> NcclResult {
    shielded(SUCCESS, || {
        steer(context, function, |preference, facts| {
            if facts.fixed {
                return Outcome::Forbidden;
            }
            if algorithm.is_null() || protocol.is_null() {
                return Outcome::Unusable(TableError::Missing);
            }
            let (row, column) = (preference.algorithm.number(), if bytes < LL_BELOW { LL } else { SIMPLE });
            // SAFETY: not null, and NCCL passes places of its own for the results.
            unsafe {
                algorithm.write(row as c_int);
                protocol.write(column as c_int);
            }
            Outcome::Steered { algorithm: row, protocol: column }
        })
    })
}

#[allow(clippy::too_many_arguments, reason = "NCCL's interface")]
unsafe extern "C" fn info_v3(
    context: *mut c_void,
    function: c_int,
    _bytes: usize,
    _operations: c_int,
    costs: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _channels: *mut c_int,
) -> NcclResult {
    // SAFETY: NCCL passes its table.
    unsafe { info(context, function, costs, (algorithms, protocols)) }
}

#[allow(clippy::too_many_arguments, reason = "NCCL's interface")]
unsafe extern "C" fn info_v4(
    context: *mut c_void,
    function: c_int,
    _bytes: usize,
    _operations: c_int,
    costs: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    _channels: *mut c_int,
) -> NcclResult {
    // SAFETY: NCCL passes its table.
    unsafe { info(context, function, costs, (algorithms, protocols)) }
}

/// # Safety
/// `costs` is null or points to as many floats as `shape` multiplies to, for this call alone.
unsafe fn info(context: *mut c_void, function: c_int, costs: *mut *mut f32, shape: (c_int, c_int)) -> NcclResult {
    shielded(SUCCESS, || {
        steer(context, function, |preference, _| {
            let entries = match entries(shape.0, shape.1) {
                Ok(entries) => entries,
                Err(error) => return Outcome::Unusable(error),
            };
            let costs = costs.cast::<f32>();
            if costs.is_null() || !costs.is_aligned() {
                return Outcome::Unusable(TableError::Missing);
            }
            // SAFETY: not null and aligned; by the contract of this function it is that long and nobody else's for
            // the time of the call. At most MOST_ENTRIES, so its bytes do not overflow.
            let costs = unsafe { std::slice::from_raw_parts_mut(costs, entries) };
            // `entries` has checked that it is positive.
            prefer(costs, shape.1 as usize, preference.algorithm)
        })
    })
}

/// What is common to all versions: only allreduces, only where something is preferred, only on known communicators.
fn steer(context: *mut c_void, function: c_int, apply: impl FnOnce(Preference, Facts) -> Outcome) -> NcclResult {
    if function != ALL_REDUCE {
        return SUCCESS;
    }
    let Some(communicator) = REGISTRY.find(context.addr()).filter(|c| c.facts.ranks > 1) else { return SUCCESS };
    count_asked();
    let Some(preference) = wanted() else { return SUCCESS };
    let outcome = apply(preference, communicator.facts);
    if let Some((level, text)) = communicator.line(preference, outcome) {
        communicator.logger.say(level, &text);
    }
    SUCCESS
}
