//! NCCL's logger: lines appear where the user's other lines of NCCL do, by `NCCL_DEBUG` and `NCCL_DEBUG_FILE`.

use super::layout::LogFunction;
use crate::communicators::Level;
use std::ffi::{CString, c_int, c_ulong};

/// `NCCL_INIT | NCCL_TUNING`: plain `NCCL_DEBUG=INFO` shows the first.
const SUBSYSTEMS: c_ulong = 1 | 64;

/// What NCCL passed at `init`; nothing is said without one.
#[derive(Debug, Clone, Copy)]
pub struct Logger(Option<LogFunction>);

impl Logger {
    /// # Safety
    /// `function` is NCCL's logger, which stays loaded for as long as its communicators live.
    pub(super) unsafe fn new(function: Option<LogFunction>) -> Self {
        Self(function)
    }

    /// Says one line.
    pub(super) fn say(self, level: Level, text: &str) {
        let Some(function) = self.0 else { return };
        // Texts are ours and have no zeros; should one have, it is not worth a line.
        let Ok(line) = CString::new(format!("flexcomm: {text}")) else { return };
        let level: c_int = match level {
            Level::Warn => 2,
            Level::Info => 3,
        };
        // SAFETY: NCCL's logger by the contract of `new`; all strings end with a zero and outlive the call; the text
        // is an argument of the format and not the format.
        unsafe { function(level, SUBSYSTEMS, c"flexcomm nccl-tuner".as_ptr(), 0, c"%s".as_ptr(), line.as_ptr()) }
    }
}
