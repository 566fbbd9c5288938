//! Rows as they come: a table or JSON on stdout, progress on stderr, the plot in its file.

use super::data::{DType, Distribution};
use super::measure::Row;
use super::plot::Plot;
use super::worker::Asked;
use anyhow::{Result, bail};
use serde::Serialize;
use std::io::{IsTerminal, Write};

/// Room for the parameters that are chosen only when there are values.
const FITTED_WIDTH: usize = "variance(alpha=12.34)+ef(vanilla)*".len();

/// A line with numbers.
#[derive(Serialize)]
struct Measured<'a> {
    #[serde(flatten)]
    row: &'a Row,
    /// Null.
    skipped: (),
}

/// A line without numbers. The fields of [`Measured`] are there, and null.
#[derive(Debug, Clone, Serialize)]
pub struct Skipped {
    #[serde(skip)]
    label: String,
    method: String,
    n: usize,
    dtype: &'static str,
    distribution: &'static str,
    fitted: bool,
    #[serde(flatten)]
    numbers: NoNumbers,
    /// Why.
    skipped: String,
}

/// Of a [`Row`].
#[derive(Debug, Clone, Default, Serialize)]
struct NoNumbers {
    gb_per_s: (),
    bytes_out: (),
    bytes_per_kept: (),
    gain: (),
    ratio_to_copy: (),
    ratio_to_torch: (),
    decompress_ratio_to_copy: (),
    compress_s: (),
    decompress_s: (),
    copy_s: (),
    threads: (),
    keeps_all: (),
}

impl Skipped {
    /// Of a method at a size.
    pub fn new((method, n): (&Asked, usize), (dtype, distribution): (DType, Distribution), reason: String) -> Self {
        Self {
            label: method.label(),
            method: method.text().to_owned(),
            n,
            dtype: dtype.name(),
            distribution: distribution.name(),
            fitted: matches!(method, Asked::Fitted(_)),
            numbers: NoNumbers::default(),
            skipped: reason,
        }
    }
}

/// Where rows go.
pub struct Output {
    json: bool,
    /// Of the column of methods.
    width: usize,
    plot: Option<Plot>,
    rows: Vec<Row>,
    skipped: usize,
    /// Whether a method has a *.
    starred: bool,
    /// Whether one has a +.
    keeps_all: bool,
    /// Rows of a whole run.
    all: usize,
    /// Progress on a terminal is one line that each next one takes.
    terminal: bool,
}

impl Output {
    /// Prints what stands above the rows.
    pub fn new(json: bool, methods: &[Asked], plot: Option<Plot>, all: usize) -> Result<Self> {
        let width = methods.iter().map(|method| match method {
            Asked::Strategy(text) => text.len() + "+".len(),
            Asked::Fitted(_) => FITTED_WIDTH,
        });
        let width = width.chain([6]).max().unwrap_or(6);
        let terminal = std::io::stderr().is_terminal();
        let output =
            Self { json, width, plot, rows: Vec::new(), skipped: 0, starred: false, keeps_all: false, all, terminal };
        match json {
            true => write_out("[\n")?,
            false => write_out(&output.head())?,
        }
        Ok(output)
    }

    fn head(&self) -> String {
        let width = self.width;
        format!(
            "{:width$} {:>10} {:5} {:>9} {:>8} {:>11} {:>6} {:>7} {:>8} {:>10} {:>8}\n",
            "method",
            "n",
            "dtype",
            "values",
            "GB/s in",
            "bytes out",
            "B/kept",
            "gain",
            "to copy",
            "decompress",
            "to torch"
        )
    }

    /// What is being done before a method.
    pub fn progress(&self, text: &str) {
        match self.terminal {
            true => eprint!("\r\x1b[2K{text}"),
            false => eprintln!("{text}"),
        }
    }

    /// A method begins.
    pub fn begin(&self, text: &str) {
        let number = self.rows.len() + self.skipped + 1;
        self.progress(&format!("[{number}/{}] {text}", self.all));
    }

    fn line<T: Serialize>(&mut self, text: &str, json: &T) -> Result<()> {
        if self.terminal {
            eprint!("\r\x1b[2K");
        }
        let comma = if self.rows.len() + self.skipped > 0 { "," } else { "" };
        match self.json {
            true => write_out(&format!("{comma}{}\n", serde_json::to_string(json)?)),
            false => write_out(text),
        }
    }

    /// A method was measured.
    pub fn row(&mut self, row: Row) -> Result<()> {
        self.line(&row_text(&row, self.width), &Measured { row: &row, skipped: () })?;
        self.starred |= row.fitted;
        self.keeps_all |= row.keeps_all;
        self.rows.push(row);
        self.plot.as_ref().map_or(Ok(()), |plot| plot.draw(&self.rows))
    }

    /// A method was not measured.
    pub fn skip(&mut self, row: &Skipped) -> Result<()> {
        let (width, Skipped { label, n, dtype, distribution, skipped, .. }) = (self.width, row);
        let text = format!("{label:width$} {n:>10} {dtype:5} {distribution:>9}  skipped: {skipped}\n");
        self.line(&text, row)?;
        self.skipped += 1;
        self.starred |= row.fitted;
        Ok(())
    }

    /// Ends the table.
    pub fn finish(self, stopped: bool) -> Result<()> {
        if self.terminal {
            eprint!("\r\x1b[2K");
        }
        match self.json {
            true => write_out("]\n")?,
            false => {
                let marks = [
                    (self.starred, "* parameters chosen from these values, so that about 1 % of them are sent\n"),
                    (self.keeps_all, "+ k is above n: all values are kept\n"),
                ];
                marks.iter().filter(|(any, _)| *any).try_for_each(|(_, text)| write_out(text))?;
            }
        }
        if stopped {
            eprintln!("ended before all was done: {} rows of {}", self.rows.len() + self.skipped, self.all);
        }
        let Some(plot) = self.plot else { return Ok(()) };
        let file = plot.file().display();
        match self.rows.is_empty() {
            true => bail!("--plot {file}: nothing was measured"),
            false => eprintln!("plot: {file}"),
        }
        Ok(())
    }
}

/// At once, also into a pipe.
fn write_out(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// In seven places: signs alone have thousands of times the energy of small gradients.
fn gain_text(gain: f64) -> String {
    if gain < 100.0 { format!("{gain:.4}") } else { format!("{gain:.1e}") }
}

fn row_text(row: &Row, width: usize) -> String {
    let torch = row.ratio_to_torch.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
    let kept = row.bytes_per_kept.map_or("-".to_owned(), |bytes| format!("{bytes:.2}"));
    let marks = [(row.fitted, "*"), (row.keeps_all, "+")].map(|(is, mark)| if is { mark } else { "" });
    let method = format!("{}{}", row.method, marks.concat());
    format!(
        "{method:width$} {:>10} {:5} {:>9} {:>8.2} {:>11} {kept:>6} {:>7} {:>8.2} {:>10.2} {torch:>8}\n",
        row.n,
        row.dtype,
        row.distribution,
        row.gb_per_s,
        row.bytes_out,
        gain_text(row.gain),
        row.ratio_to_copy,
        row.decompress_ratio_to_copy
    )
}
