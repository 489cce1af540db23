// Formats durations as `formatting.py` does; a test compares the two.

const digits = (value) => {
  const decimals = Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2;
  const written = value.toFixed(decimals);
  return written.includes(".") ? written.replace(/\.?0+$/, "") : written;
};

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds <= 0) return "0 s";
  if (seconds < 0.9995) return `${digits(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${digits(Math.round(seconds * 10) / 10)} s`;
  if (seconds < 99.5) return `${seconds.toFixed(0)} s`;
  if (seconds < 599.5) return two(Math.round(seconds), "min", "s");
  if (seconds < 3570) return `${(seconds / 60).toFixed(0)} min`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 2880) return two(minutes, "h", "min");
  return `${Math.floor(minutes / 1440)} days`;
}

const two = (value, large, small) => `${Math.floor(value / 60)} ${large}${value % 60 ? ` ${value % 60} ${small}` : ""}`;

export function ago(seconds) {
  if (seconds < 1) return "just now";
  return `${duration(seconds < 100 ? Math.round(seconds) : Math.round(seconds / 60) * 60)} ago`;
}
