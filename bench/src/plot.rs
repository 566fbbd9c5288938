//! Rows as SVG: one bar per row, on a logarithmic axis.

use super::measure::Row;
use anyhow::{Context, Result, bail};
use std::fmt::Write;
use std::path::{Path, PathBuf};

const LINE: usize = 16;
const LEFT: usize = 470;
const WIDTH: f64 = 500.0;
/// Least and largest ratio on the axis, as powers of ten.
const AXIS: (f64, f64) = (-1.0, 3.0);

/// A file that can be written, as was checked before anything is measured.
pub struct Plot {
    file: PathBuf,
    /// Nothing was there before: what stays empty goes again.
    new: bool,
}

impl Plot {
    /// Refuses other formats than SVG, and files that cannot be written.
    pub fn new(file: PathBuf) -> Result<Self> {
        if !file.extension().is_some_and(|name| name.eq_ignore_ascii_case("svg")) {
            bail!("--plot {}: only SVG is drawn, the file's name must end in .svg", file.display());
        }
        let new = !file.exists();
        let opened = std::fs::OpenOptions::new().create(true).append(true).open(&file);
        opened.with_context(|| format!("--plot {}", file.display()))?;
        Ok(Self { file, new })
    }

    /// Its name.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Replaces it by these rows.
    pub fn draw(&self, rows: &[Row]) -> Result<()> {
        std::fs::write(&self.file, svg(rows)).with_context(|| format!("--plot {}", self.file.display()))
    }
}

impl Drop for Plot {
    fn drop(&mut self) {
        if self.new && std::fs::metadata(&self.file).is_ok_and(|file| file.len() == 0) {
            // An empty file that stays behind does no harm.
            let _ = std::fs::remove_file(&self.file);
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Where a ratio lies.
fn place(ratio: f64) -> f64 {
    let share = (ratio.max(1e-9).log10() - AXIS.0) / (AXIS.1 - AXIS.0);
    LEFT as f64 + WIDTH * share.clamp(0.0, 1.0)
}

/// The drawing: time to compress over that of a copy.
fn svg(rows: &[Row]) -> String {
    let height = (rows.len() + 4) * LINE;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1040\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"1040\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"8\" y=\"14\" font-size=\"13\">time to compress, as multiples of a plain copy of the same bytes</text>\n"
    );
    // Writing to a string cannot fail.
    for power in AXIS.0 as i32..=AXIS.1 as i32 {
        let (ratio, bottom) = (10f64.powi(power), height - LINE);
        let x = place(ratio);
        let _ = writeln!(out, "<line x1=\"{x}\" x2=\"{x}\" y1=\"24\" y2=\"{bottom}\" stroke=\"#ccc\"/>");
        let _ = writeln!(out, "<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{ratio}</text>", height - 4);
    }
    for (i, row) in rows.iter().enumerate() {
        let (y, end) = ((i + 2) * LINE, place(row.ratio_to_copy));
        let label = escape(&format!("{}  n={:e}  {}", row.method, row.n as f64, row.distribution));
        let _ = writeln!(out, "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{label}</text>", LEFT - 6, y + 11);
        let bar = end - LEFT as f64;
        let _ = writeln!(out, "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{bar:.1}\" height=\"12\" fill=\"#4878a8\"/>");
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{}\">{:.2}</text>", end + 4.0, y + 11, row.ratio_to_copy);
    }
    out + "</svg>\n"
}
