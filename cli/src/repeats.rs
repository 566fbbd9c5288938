//! Warnings and errors of one cause, and trainers that come and go, once in an interval: neither a fault that lasts nor a
//! client that connects again and again fills a disk with lines. What is suppressed is counted, and the count is written
//! when the interval is over.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
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
/// Causes of one line of the program that are told apart in an interval: the nodes of a cluster that fall silent together.
/// More of them, such as a client makes up, are counted only.
const MAX_CAUSES: usize = 256;
/// Fields that name what an event is about. Their values are told apart as they are; in all others, which say what was
/// seen, digits do not count.
const IDENTIFYING: [&str; 10] = ["from", "interface", "job", "name", "node", "path", "peer", "rank", "row", "source"];

/// Whose every line is counted, whatever its level: clients cause them at will.
const CAUSED_BY_CLIENTS: &str = "flexcomm_agent::trainers";

/// The lines of one place in the program within one interval.
#[derive(Debug)]
struct Place {
    since: Instant,
    /// With how many lines of each were suppressed.
    causes: BTreeMap<String, u64>,
    /// Lines of further causes.
    further: u64,
}

impl Place {
    fn new(since: Instant) -> Self {
        Self { since, causes: BTreeMap::new(), further: 0 }
    }

    /// Whether a line of this cause is written.
    fn admit(&mut self, cause: String) -> bool {
        let full = self.causes.len() >= MAX_CAUSES;
        match self.causes.entry(cause) {
            Entry::Occupied(mut suppressed) => *suppressed.get_mut() += 1,
            Entry::Vacant(_) if full => self.further += 1,
            Entry::Vacant(new) => {
                new.insert(0);
                return true;
            }
        }
        false
    }

    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= INTERVAL
    }

    /// What was suppressed.
    fn count(&self) -> Option<String> {
        let repeated = || self.causes.iter().filter(|(_, suppressed)| **suppressed > 0);
        let lines = repeated().map(|(_, suppressed)| suppressed).sum::<u64>() + self.further;
        let mut causes: Vec<_> = repeated().map(|(cause, _)| cause.trim_end().to_owned()).collect();
        if self.further > 0 {
            causes.push(format!("{} of them beyond the first {MAX_CAUSES} causes", self.further));
        }
        let causes = causes.join("; ");
        (lines > 0).then(|| format!("{lines} lines were suppressed within {} s: {causes}", INTERVAL.as_secs()))
    }
}

/// What an event says, without numbers that differ from line to line of one cause.
#[derive(Default)]
struct Cause(String);

impl Cause {
    fn of(event: &Event<'_>) -> Self {
        let mut cause = Self::default();
        event.record(&mut cause);
        cause
    }
}

impl Visit for Cause {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?} ");
        let identifies = IDENTIFYING.contains(&field.name());
        self.0.extend(text.chars().filter(|c| identifies || !c.is_ascii_digit()));
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
    fn admit(&self, event: &Event<'_>, now: Instant) -> (bool, Vec<String>) {
        let metadata = event.metadata();
        let is_counted = *metadata.level() <= Level::WARN || metadata.target().starts_with(CAUSED_BY_CLIENTS);
        // Before the lock: a value's Display may log.
        let cause = is_counted.then(|| Cause::of(event));
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let over = places.extract_if(|_, place| place.is_over(now));
        let counts = over.filter_map(|(_, place)| place.count()).collect();
        let Some(Cause(cause)) = cause else { return (true, counts) };
        let place = places.entry(metadata.callsite()).or_insert_with(|| Place::new(now));
        (place.admit(cause), counts)
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
        for count in counts {
            SystemTime.format_time(&mut writer)?;
            writeln!(writer, "  WARN {count}")?;
        }
        if admitted { self.inner.format_event(ctx, writer, event) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tracing_subscriber::fmt::format;

    const WAIT_LIMIT: Duration = Duration::from_secs(10);

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
    fn trainers_that_come_and_go_are_written_once_each_and_bounded() {
        let lines = logged(|| {
            for i in 0..1300 {
                tracing::info!(target: "flexcomm_agent::trainers", job = "j", rank = 0, trainer = i, "trainer joined");
                tracing::info!(target: "flexcomm_agent::trainers", job = format!("j{i}"), rank = 0, "trainer left");
            }
        });
        let count = |what: &str| lines.iter().filter(|line| line.contains(what)).count();
        assert_eq!((count("joined"), count("left")), (1, MAX_CAUSES));
    }

    /// A switch that dies takes many nodes at once.
    #[test]
    fn each_of_many_nodes_jobs_ranks_and_addresses_is_named_once() {
        let lines = logged(|| {
            for i in (0..40).chain(0..40) {
                tracing::warn!(job = "slurm-4711", node = %format_args!("node-{i}"), silent_s = i, "a node is missing");
                tracing::warn!(job = %format_args!("slurm-{i}"), "failed");
                tracing::warn!(job = "slurm-4711", rank = i, "a rank's steps are not counted");
                tracing::warn!(source = ?std::net::Ipv4Addr::new(10, 0, 0, i), overall = i, "too many connections");
            }
        });
        for i in 0..40 {
            for name in
                [format!("node=node-{i} "), format!("job=slurm-{i} "), format!("rank={i} "), format!("10.0.0.{i} ")]
            {
                let count = lines.iter().filter(|line| format!("{line} ").contains(&name)).count();
                assert_eq!(count, 1, "{name} in {lines:#?}");
            }
        }
    }

    #[test]
    fn numbers_in_the_text_of_an_error_make_no_new_cause() {
        let lines = logged(|| {
            for i in 0..40 {
                tracing::warn!(error = %format_args!("{i} bytes are left"), seq = i, "failed to write");
                tracing::warn!(why = format!("step {i} is behind {}", i + 1), count = i, "rejected");
            }
        });
        assert_eq!(lines.len(), 2, "{lines:#?}");
    }

    /// A value in whose text another line is logged, by a thread of its own: tracing would hide it from one that logs.
    struct Logs(tracing::Dispatch, Arc<AtomicBool>);

    impl fmt::Display for Logs {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let (dispatch, (done, end)) = (self.0.clone(), std::sync::mpsc::channel());
            std::thread::spawn(move || {
                tracing::dispatcher::with_default(&dispatch, || tracing::warn!("from within"));
                done.send(())
            });
            self.1.fetch_or(end.recv_timeout(WAIT_LIMIT).is_err(), Ordering::Relaxed);
            f.write_str("outer")
        }
    }

    #[test]
    fn fields_are_formatted_while_nothing_is_locked() {
        let waited = Arc::<AtomicBool>::default();
        let lines = logged(|| {
            let dispatch = tracing::dispatcher::get_default(Clone::clone);
            tracing::warn!(error = %Logs(dispatch, waited.clone()), "failed");
        });
        assert!(!waited.load(Ordering::Relaxed), "a line waited for another line's field");
        assert_eq!(lines.iter().filter(|line| line.contains("from within") || line.contains("outer")).count(), 2);
    }

    #[test]
    fn made_up_causes_are_bounded() {
        let lines = logged(|| (0..400).for_each(|i| tracing::warn!("refused: {}", "x".repeat(i))));
        assert_eq!(lines.len(), MAX_CAUSES);
        let mut place = Place::new(Instant::now());
        assert_eq!((0..400).filter(|i| place.admit(i.to_string())).count(), MAX_CAUSES);
        place.admit("7".into());
        let count = place.count().unwrap();
        assert_eq!(count, "145 lines were suppressed within 60 s: 7; 144 of them beyond the first 256 causes");
    }

    #[test]
    fn after_the_interval_the_count_is_written_and_the_next_line() {
        let (begun, mut lines) = (Instant::now(), Vec::new());
        let later = begun + INTERVAL;
        let mut place = Place::new(begun);
        for _ in 0..20 {
            lines.push(place.admit("full".into()));
        }
        assert_eq!((lines.iter().filter(|written| **written).count(), place.causes["full"]), (1, 19));
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
        let full = Place { since: past, causes: [("the disk is full".into(), 379)].into(), further: 0 };
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
