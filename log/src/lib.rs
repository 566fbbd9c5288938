//! Lines for stderr that never fail and never block: a thread writes them. What comes while [`MOST_WAITING`] lines wait,
//! and what stderr refuses, is dropped and counted. A daemon's stderr may be a pipe that is closed or that its reader
//! does not empty; neither may end a request or a trainer's connection.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Most lines that wait: some seconds of a busy controller at level debug.
pub const MOST_WAITING: usize = 1024;

/// Longest line in bytes; the rest is cut. With [`MOST_WAITING`] it bounds what waits to 16 MiB.
pub const MOST_BYTES: usize = 16 << 10;

/// Longest wait for the last lines when the process ends: a reader that is alive takes them in less.
pub const FLUSH_WITHIN: Duration = Duration::from_secs(1);

static LINES: OnceLock<Lines> = OnceLock::new();

fn lines() -> &'static Lines {
    // A descriptor of its own: std's lock on stderr would make others wait for this thread's write.
    LINES.get_or_init(|| match io::stderr().as_fd().try_clone_to_owned() {
        Ok(stderr) => Lines::to(File::from(stderr)),
        Err(_) => Lines::to(Refused),
    })
}

/// A writer of whole lines: each call of `write` is one.
#[must_use]
pub fn stderr() -> impl Write {
    lines()
}

/// Writes one line that is no log event, such as why a process ends.
pub fn write_line(text: &str) {
    lines().push(format!("{text}\n").into_bytes());
}

/// Makes panics log lines. The default writes to stderr itself, and so may wait for ever. After a panic of the main
/// thread the process ends, so its line is waited for.
pub fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed").to_owned();
        write_line(&panic_text(&name, panic, &Backtrace::capture()));
        if name == "main" {
            flush();
        }
    }));
}

fn panic_text(thread: &str, panic: &dyn std::fmt::Display, backtrace: &Backtrace) -> String {
    match backtrace.status() {
        BacktraceStatus::Captured => format!("thread '{thread}' {panic}\n{backtrace}"),
        _ => format!("thread '{thread}' {panic}"),
    }
}

/// Waits until all lines are written, at most [`FLUSH_WITHIN`].
pub fn flush() {
    if let Some(lines) = LINES.get() {
        lines.flush_within(FLUSH_WITHIN);
    }
}

/// Lines dropped since the last call.
pub fn take_dropped() -> u64 {
    LINES.get().map_or(0, |lines| lines.counts.dropped.swap(0, Ordering::Relaxed))
}

/// What stands for a stderr that cannot be had.
struct Refused;

impl Write for Refused {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Counts {
    waiting: AtomicUsize,
    dropped: AtomicU64,
}

impl Counts {
    fn drop_one(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// The queue to a thread that writes.
#[derive(Debug)]
struct Lines {
    queue: SyncSender<Vec<u8>>,
    counts: std::sync::Arc<Counts>,
}

impl Lines {
    /// Without a thread, every line is dropped and counted.
    fn to(sink: impl Write + Send + 'static) -> Self {
        let (queue, lines) = sync_channel(MOST_WAITING);
        let counts = std::sync::Arc::<Counts>::default();
        let shared = counts.clone();
        let thread = std::thread::Builder::new().name("flexcomm-log".into());
        drop(thread.spawn(move || write_all(&lines, sink, &shared)));
        Self { queue, counts }
    }

    fn push(&self, mut line: Vec<u8>) {
        if line.len() > MOST_BYTES {
            line.truncate(MOST_BYTES - 1);
            line.push(b'\n');
        }
        self.counts.waiting.fetch_add(1, Ordering::Relaxed);
        if self.queue.try_send(line).is_err() {
            self.counts.waiting.fetch_sub(1, Ordering::Relaxed);
            self.counts.drop_one();
        }
    }

    fn flush_within(&self, limit: Duration) {
        let since = Instant::now();
        while self.counts.waiting.load(Ordering::Relaxed) > 0 && since.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn write_all(lines: &Receiver<Vec<u8>>, mut sink: impl Write, counts: &Counts) {
    for line in lines {
        if sink.write_all(&line).is_err() {
            counts.drop_one();
        }
        counts.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Write for &Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    /// Passes on what is written, once it may.
    struct Slow(Receiver<()>, Sender<Vec<u8>>);

    impl Write for Slow {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.0.recv().map_err(io::Error::other)?;
            self.1.send(line.to_vec()).map_err(io::Error::other)?;
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_sink_that_takes_nothing_costs_lines_and_no_time() {
        let ((may, wait), (pass, written)) = (channel(), channel());
        let lines = Lines::to(Slow(wait, pass));
        for number in 0..MOST_WAITING + 101 {
            lines.push(format!("{number}\n").into_bytes());
        }
        // One may be on its way out of the queue.
        let dropped = lines.counts.dropped.load(Ordering::Relaxed);
        assert!((100..=101).contains(&dropped), "{dropped} dropped");
        lines.flush_within(Duration::from_millis(10));
        drop(std::iter::repeat_with(|| may.send(())).take(MOST_WAITING + 1).collect::<Vec<_>>());
        lines.flush_within(Duration::from_secs(60));
        let written: Vec<_> = written.try_iter().collect();
        assert_eq!(written.len() as u64 + dropped, MOST_WAITING as u64 + 101);
        assert_eq!(written[..2], [b"0\n".to_vec(), b"1\n".to_vec()], "the oldest, in order");
    }

    #[test]
    fn a_sink_that_fails_is_tried_again_with_every_line() {
        let lines = Lines::to(Refused);
        for _ in 0..7 {
            lines.push(b"x\n".to_vec());
        }
        lines.flush_within(Duration::from_secs(60));
        assert_eq!(lines.counts.dropped.load(Ordering::Relaxed), 7);
    }

    #[test]
    fn a_panic_has_a_backtrace_where_one_was_captured() {
        assert_eq!(panic_text("main", &"panicked", &Backtrace::disabled()), "thread 'main' panicked");
        let captured = panic_text("main", &"panicked", &Backtrace::force_capture());
        assert!(
            captured.starts_with("thread 'main' panicked\n") && captured.contains("panic_has_a_backtrace"),
            "{captured}"
        );
    }

    #[test]
    fn a_long_line_is_cut() {
        let ((may, wait), (pass, written)) = (channel(), channel());
        may.send(()).unwrap();
        Lines::to(Slow(wait, pass)).push(vec![b'x'; 3 * MOST_BYTES]);
        let line = written.recv().unwrap();
        assert_eq!((line.len(), line[MOST_BYTES - 1]), (MOST_BYTES, b'\n'));
    }
}
