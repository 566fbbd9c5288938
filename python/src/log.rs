//! Rust's log lines, for Python's `logging`: gathered here, fetched by the package once a step.

use pyo3::prelude::*;
use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// Most lines that wait; the oldest go first.
const MAX_LINES: usize = 256;

static LINES: Mutex<VecDeque<(LogLevel, String)>> = Mutex::new(VecDeque::new());

/// With the numbers of Python's `logging`.
#[pyclass(eq, eq_int, frozen)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    Info = 20,
    Warning = 30,
    Error = 40,
}

/// Lines that went before they were fetched.
static DROPPED: AtomicU64 = AtomicU64::new(0);

struct Gather;

#[derive(Default)]
struct Text(String, String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a String does not fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.1, " {name}={value:?}"),
        };
    }
}

impl<S: tracing::Subscriber> Layer<S> for Gather {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let level = match *event.metadata().level() {
            tracing::Level::ERROR => LogLevel::Error,
            tracing::Level::WARN => LogLevel::Warning,
            tracing::Level::INFO => LogLevel::Info,
            _ => return,
        };
        let mut text = Text::default();
        event.record(&mut text);
        let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() >= MAX_LINES {
            lines.pop_front();
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        lines.push_back((level, text.0 + &text.1));
    }
}

/// Begins gathering; once a process, unless the process has a subscriber of its own.
pub fn begin() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Gather));
    });
}

/// What has gathered; first, how many older lines were dropped.
pub fn take() -> Vec<(LogLevel, String)> {
    let gathered: Vec<_> = LINES.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect();
    let dropped = match DROPPED.swap(0, Ordering::Relaxed) {
        0 => None,
        lines => Some((
            LogLevel::Warning,
            format!("{lines} older log lines were dropped: more than {MAX_LINES} came in one step"),
        )),
    };
    dropped.into_iter().chain(gathered).collect()
}
