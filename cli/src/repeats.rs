//! Warnings and errors of one cause, once in an interval: a fault that lasts fills no disk with its lines. What is
//! suppressed is counted, and the count is written when the interval is over.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// A cause is written once in this time.
const INTERVAL: Duration = Duration::from_secs(60);
/// Causes of one line of the program that are told apart in an interval: a few jobs, peers or reasons. More of them come
/// from a client that makes them up.
const MAX_CAUSES: usize = 8;

/// The lines of one place in the program within one interval.
#[derive(Debug)]
struct Place {
    since: Instant,
    causes: Vec<String>,
    suppressed: u64,
}

impl Place {
    fn new(since: Instant) -> Self {
        Self { since, causes: Vec::new(), suppressed: 0 }
    }

    /// Whether a line of this cause is written.
    fn admit(&mut self, cause: String) -> bool {
        let new = self.causes.len() < MAX_CAUSES && !self.causes.contains(&cause);
        if new {
            self.causes.push(cause);
        } else {
            self.suppressed += 1;
        }
        new
    }

    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= INTERVAL
    }
}

/// What an event says, without its numbers: they differ from line to line of one cause.
#[derive(Default)]
struct Cause(String);

impl Visit for Cause {
    fn record_debug(&mut self, _: &Field, value: &dyn fmt::Debug) {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = write!(text, "{value:?} ");
        self.0.extend(text.chars().filter(|c| !c.is_ascii_digit()));
    }
}

/// Writes what `F` writes, each cause once in an interval.
#[derive(Debug)]
pub struct Repeats<F> {
    inner: F,
    /// Bounded by the lines of the program.
    places: Mutex<HashMap<Identifier, Place>>,
}

impl<F> Repeats<F> {
    /// Around a format.
    pub fn of(inner: F) -> Self {
        Self { inner, places: Mutex::default() }
    }

    /// Whether the event is written at `now`, and the counts of intervals that are over by then.
    fn admit(&self, event: &Event<'_>, now: Instant) -> (bool, Vec<Place>) {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let over = places.extract_if(|_, place| place.is_over(now)).map(|(_, place)| place);
        let counts = over.filter(|place| place.suppressed > 0).collect();
        if *event.metadata().level() > Level::WARN {
            return (true, counts);
        }
        let mut cause = Cause::default();
        event.record(&mut cause);
        let place = places.entry(event.metadata().callsite()).or_insert_with(|| Place::new(now));
        (place.admit(cause.0), counts)
    }
}

impl<S, N, F> FormatEvent<S, N> for Repeats<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let (admitted, counts) = self.admit(event, Instant::now());
        for Place { causes, suppressed, .. } in counts {
            SystemTime.format_time(&mut writer)?;
            let causes = causes.join("; ");
            writeln!(writer, "  WARN {suppressed} lines were suppressed within {} s: {causes}", INTERVAL.as_secs())?;
        }
        if admitted { self.inner.format_event(ctx, writer, event) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tracing_subscriber::fmt::format;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(work: impl FnOnce()) -> Vec<String> {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .event_format(Repeats::of(format().with_target(false)))
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, work);
        String::from_utf8(lines.0.lock().unwrap().clone()).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_cause_is_written_once_and_other_causes_beside_it() {
        let lines = logged(|| {
            for i in 0..400 {
                tracing::error!("failed to spool a report: {i} bytes wait already");
                tracing::warn!(job = if i % 2 == 0 { "a" } else { "b" }, "failed");
                tracing::info!("step {i}");
            }
        });
        let count = |what: &str| lines.iter().filter(|line| line.contains(what)).count();
        assert_eq!((count("failed to spool"), count("job=\"a\""), count("job=\"b\"")), (1, 1, 1));
        assert_eq!(count("INFO"), 400, "what is no warning is not counted");
    }

    #[test]
    fn made_up_causes_are_bounded() {
        let lines = logged(|| (0..400).for_each(|i| tracing::warn!("refused: {}", "x".repeat(i))));
        assert_eq!(lines.len(), MAX_CAUSES);
    }

    #[test]
    fn after_the_interval_the_count_is_written_and_the_next_line() {
        let (begun, mut lines) = (Instant::now(), Vec::new());
        let later = begun + INTERVAL;
        let mut place = Place::new(begun);
        for _ in 0..20 {
            lines.push(place.admit("full".into()));
        }
        assert_eq!((lines.iter().filter(|written| **written).count(), place.suppressed), (1, 19));
        assert!(!place.is_over(later - Duration::from_nanos(1)) && place.is_over(later));
        assert!(Place::new(later).admit("full".into()));
    }

    #[test]
    fn counts_are_written_before_the_next_line_of_any_kind() {
        let repeats = Repeats::of(format().with_target(false));
        let past = Instant::now().checked_sub(INTERVAL).unwrap();
        let callsite = {
            use tracing::Callsite;
            static SITE: tracing::callsite::DefaultCallsite = tracing::callsite::DefaultCallsite::new(&META);
            static META: tracing::Metadata<'static> = tracing::metadata! {
                name: "x", target: "x", level: Level::WARN, fields: &[], callsite: &SITE,
                kind: tracing::metadata::Kind::EVENT
            };
            SITE.metadata().callsite()
        };
        let full = Place { since: past, causes: vec!["the disk is full".into()], suppressed: 379 };
        repeats.places.lock().unwrap().insert(callsite, full);
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).event_format(repeats);
        let subscriber = subscriber.with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, || tracing::info!("agent ends"));
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let mut lines = text.lines();
        assert!(
            lines.next().unwrap().ends_with("WARN 379 lines were suppressed within 60 s: the disk is full"),
            "{text}"
        );
        assert!(lines.next().unwrap().ends_with("INFO agent ends"), "{text}");
    }
}
