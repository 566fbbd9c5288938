//! What charts are drawn of: SVG, and axes.

use crate::fixed::rounded;
use std::fmt::Write;

/// Of every chart.
pub(crate) const WIDTH: f64 = 900.0;
/// Space for names at the left, and for what is left over at the right.
pub(crate) const LEFT: f64 = 190.0;
pub(crate) const RIGHT: f64 = 40.0;
/// For title and legend.
pub(crate) const TOP: f64 = 70.0;
/// Beneath, for the numbers of an axis and its title.
pub(crate) const BOTTOM: f64 = 50.0;

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// As much of a text as so many characters hold.
pub(crate) fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// A chart under construction.
pub(crate) struct Svg {
    text: String,
}

impl Svg {
    pub(crate) fn new(title: &str, height: f64) -> Self {
        let text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        let mut svg = Self { text };
        svg.label(16.0, 24.0, "start", "black", title);
        svg
    }

    fn element(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing into a string does not fail.
        let _ = writeln!(self.text, "{element}");
    }

    pub(crate) fn label(&mut self, x: f64, y: f64, anchor: &str, colour: &str, text: &str) {
        let text = escape(text);
        self.element(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{text}</text>"
        ));
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str, width: f64) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.element(format_args!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\" stroke-width=\"{width}\"/>"
        ));
    }

    pub(crate) fn polyline(&mut self, points: impl Iterator<Item = (f64, f64)>, colour: &str) {
        let points: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let points = points.join(" ");
        self.element(format_args!(
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\"/>"
        ));
    }

    pub(crate) fn bar(&mut self, (x, y): (f64, f64), width: f64, height: f64, colour: &str) {
        self.element(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
        ));
    }

    /// `tip` is shown where a pointer stands on it.
    pub(crate) fn dot(&mut self, (x, y): (f64, f64), radius: f64, colour: &str, tip: &str) {
        let tip = escape(tip);
        self.element(format_args!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{colour}\"><title>{tip}</title></circle>"
        ));
    }

    /// Lines with their names, from an `x` on.
    pub(crate) fn legend<'a>(&mut self, mut x: f64, names: impl IntoIterator<Item = (&'a str, &'a str)>) {
        for (name, colour) in names {
            self.line((x, 42.0), (x + 18.0, 42.0), colour, 3.0);
            self.label(x + 23.0, 46.0, "start", "black", name);
            x += 44.0 + 6.6 * name.chars().count() as f64;
        }
    }

    /// The numbers of a horizontal axis with their lines from `top` to `bottom`, and its title beneath.
    pub(crate) fn horizontal(&mut self, axis: &Axis, (top, bottom): (f64, f64), title: &str) {
        for tick in axis.ticks() {
            let x = axis.at(tick);
            self.line((x, top), (x, bottom), "#ddd", 1.0);
            self.label(x, bottom + 16.0, "middle", "black", &axis.number(tick));
        }
        self.label((axis.from + axis.to) / 2.0, bottom + 36.0, "middle", "black", title);
    }

    /// The numbers of a vertical axis with their lines from `left` to `right`, and its title beside.
    pub(crate) fn vertical(&mut self, axis: &Axis, (left, right): (f64, f64), title: &str) {
        for tick in axis.ticks() {
            let y = axis.at(tick);
            self.line((left, y), (right, y), "#ddd", 1.0);
            self.label(left - 8.0, y + 4.0, "end", "black", &axis.number(tick));
        }
        let (x, y) = (left - 62.0, (axis.from + axis.to) / 2.0);
        let title = escape(title);
        self.element(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 {x:.1} {y:.1})\">{title}</text>"
        ));
    }

    pub(crate) fn end(mut self) -> String {
        self.text.push_str("</svg>\n");
        self.text
    }
}

/// How an axis is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    Linear,
    Logarithmic,
    /// Linear, of shares that are shown in percent.
    Percent,
}

/// Values to pixels: from the least to the largest.
pub(crate) struct Axis {
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) from: f64,
    pub(crate) to: f64,
    scale: Scale,
}

impl Axis {
    pub(crate) fn of(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64, scale: Scale) -> Self {
        let values = values.filter(|value| value.is_finite() && (scale != Scale::Logarithmic || *value > 0.0));
        let (low, high) = (values.clone().fold(f64::INFINITY, f64::min), values.fold(f64::NEG_INFINITY, f64::max));
        let (low, high) = if low < high { (low, high) } else { (0.5, 2.0) };
        Self { low, high, from, to, scale }
    }

    /// A value's place; the nearest end's of one beyond.
    pub(crate) fn at(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.scale == Scale::Logarithmic { value.max(1e-12).ln() } else { value };
        let share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low));
        self.from + (self.to - self.from) * share.clamp(0.0, 1.0)
    }

    fn number(&self, tick: f64) -> String {
        match self.scale {
            Scale::Percent => format!("{} %", rounded(100.0 * tick)),
            Scale::Linear | Scale::Logarithmic => rounded(tick).to_string(),
        }
    }

    /// Round numbers in between.
    fn ticks(&self) -> Vec<f64> {
        /// With labels that have space beside each other.
        const MOST: usize = 12;
        let times = |steps: &[f64]| -> Vec<f64> {
            let tick = |power, step: &f64| format!("{step}e{power}").parse().unwrap_or(f64::NAN);
            (-6..9).flat_map(|power| steps.iter().map(move |step| tick(power, step))).collect()
        };
        let decades = times(&[1.0, 2.0, 5.0]);
        if self.scale == Scale::Logarithmic {
            let within = |ticks: Vec<f64>| -> Vec<f64> {
                ticks.into_iter().filter(|tick| (self.low..=self.high).contains(tick)).collect()
            };
            let coarse = within(decades);
            let fine = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
            return match coarse.len() {
                ..3 => within(times(&fine)),
                3..=MOST => coarse,
                _ => within(times(&[1.0])),
            };
        }
        let span = self.high - self.low;
        let step = decades.into_iter().find(|step| span / step <= 8.0).unwrap_or(span);
        let first = (self.low / step).ceil() as i64;
        // With the last one where rounding puts it just beyond.
        (first..first + 9).map(|n| n as f64 * step).filter(|tick| *tick <= self.high + 1e-9 * span).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_can_be_read() {
        let numbers = |low: f64, high: f64, scale| {
            let axis = Axis::of([low, high].into_iter(), 0.0, 100.0, scale);
            axis.ticks().into_iter().map(|tick| axis.number(tick)).collect::<Vec<_>>()
        };
        assert_eq!(numbers(0.0, 0.35, Scale::Linear), ["0", "0.05", "0.1", "0.15", "0.2", "0.25", "0.3", "0.35"]);
        assert_eq!(numbers(0.0, 0.6, Scale::Percent), ["0 %", "10 %", "20 %", "30 %", "40 %", "50 %", "60 %"]);
        assert_eq!(numbers(0.9, 6.0, Scale::Logarithmic), ["1", "2", "5"]);
        assert_eq!(numbers(0.9, 1.35, Scale::Logarithmic), ["0.9", "1", "1.1", "1.2", "1.3"]);
        // Over many decades not every 2 and 5.
        assert_eq!(numbers(1e-4, 10.0, Scale::Logarithmic), ["0.0001", "0.001", "0.01", "0.1", "1", "10"]);
    }

    #[test]
    fn texts_are_cut_and_escaped() {
        assert_eq!((cut("abcdef", 6), cut("abcdefg", 6)), ("abcdef".into(), "abcde…".into()));
        let mut svg = Svg::new("a < b & c", 10.0);
        svg.dot((1.0, 2.0), 3.0, "red", "x > y");
        let text = svg.end();
        assert!(text.contains(">a &lt; b &amp; c<") && text.contains("<title>x &gt; y</title>"), "{text}");
    }
}
