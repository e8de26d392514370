// Finds the top-level `model` of a JSON object that arrives in pieces: one step for each byte, whatever the bytes are.
// Of a document that a JSON parser accepts it reads what the parser reads: the last `model` counts, keys may be
// escaped. It does not validate values, so of others it may find anything. It knows nothing of the memory layer.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace py = pybind11;

namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr std::string_view kWanted = "model";
constexpr size_t kNoMatch = SIZE_MAX;
constexpr size_t kMostNameBytes = 4096;

enum class Expects {
    kObject,
    kKeyOrEnd,
    kKey,
    kKeyText,
    kKeyEscape,
    kKeyHex,
    kColon,
    kValue,
    kScalar,
    kText,
    kTextEscape,
    kNested,
    kCommaOrEnd,
    kNothing,
};

bool is_space(unsigned char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

int hex_digit(unsigned char c) {
    if (c >= '0' && c <= '9') return c - '0';
    const unsigned char lower = c | 0x20;
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

class JsonScan {
  public:
    void feed(std::string_view data) {
        for (const char c : data) {
            if (expects_ == Expects::kNothing) return;
            step(static_cast<unsigned char>(c));
            ++at_;
        }
    }

    bool is_object() const { return is_object_; }
    bool ended() const { return expects_ == Expects::kNothing; }
    int64_t named() const { return named_; }
    int64_t start() const { return start_; }
    int64_t end() const { return end_; }
    bool is_too_long() const { return is_too_long_; }
    py::bytes token() const { return token_; }

  private:
    void step(unsigned char c) {
        if (keeps_ && !keep(c)) return;
        switch (expects_) {
            case Expects::kText:  // first, since nearly all bytes are text
                if (c == '\\') {
                    expects_ = Expects::kTextEscape;
                } else if (c == '"') {
                    end_text();
                }
                return;
            case Expects::kTextEscape:
                expects_ = Expects::kText;
                return;
            case Expects::kNested:
                return step_nested(c);
            case Expects::kScalar:
                if (c == ',' || c == '}') return end_member(c);
                return refuse_if(c == '"' || c == ':' || c == '{' || c == '[' || c == ']');
            case Expects::kKeyText:
                if (c == '"') {
                    is_model_ = matched_ == kWanted.size();
                    expects_ = Expects::kColon;
                } else if (c == '\\') {
                    expects_ = Expects::kKeyEscape;
                } else {
                    match(c);
                }
                return;
            case Expects::kKeyEscape:
                if (c == 'u') {
                    expects_ = Expects::kKeyHex;
                    digits_ = unit_ = 0;
                } else {  // no other escape stands for a letter
                    matched_ = kNoMatch;
                    expects_ = Expects::kKeyText;
                }
                return;
            case Expects::kKeyHex:
                return step_hex(c);
            case Expects::kObject:
                return step_start(c);
            default:
                break;
        }
        if (is_space(c)) return;
        switch (expects_) {
            case Expects::kKeyOrEnd:
                if (c == '}') return end_member(c);
                [[fallthrough]];
            case Expects::kKey:
                expects_ = Expects::kKeyText;
                matched_ = 0;
                return refuse_if(c != '"');
            case Expects::kColon:
                expects_ = Expects::kValue;
                return refuse_if(c != ':');
            case Expects::kValue:
                return step_value(c);
            default:  // kCommaOrEnd
                if (c == ',' || c == '}') return end_member(c);
                return refuse_if(true);
        }
    }

    void step_start(unsigned char c) {
        if (at_ == mark_ && at_ < static_cast<int64_t>(kByteOrderMark.size()) &&
            c == static_cast<unsigned char>(kByteOrderMark[at_])) {
            ++mark_;
        } else if (mark_ != 0 && mark_ != static_cast<int64_t>(kByteOrderMark.size())) {
            refuse_if(true);
        } else if (c == '{') {
            expects_ = Expects::kKeyOrEnd;
        } else {
            refuse_if(!is_space(c));
        }
    }

    void step_hex(unsigned char c) {
        const int digit = hex_digit(c);
        if (digit < 0) {
            return refuse_if(true);
        }
        unit_ = unit_ * 16 + digit;
        if (++digits_ == 4) {
            match(unit_);
            expects_ = Expects::kKeyText;
        }
    }

    void step_value(unsigned char c) {
        if (is_model_) {
            ++named_;
            start_ = c == '"' ? at_ : -1;
            end_ = -1;
            token_.clear();
            keeps_ = c == '"';
            if (keeps_) keep(c);
        }
        if (c == '"') {
            expects_ = Expects::kText;
        } else if (c == '{' || c == '[') {
            depth_ = 1;
            expects_ = Expects::kNested;
        } else {
            expects_ = Expects::kScalar;
            refuse_if(c == ',' || c == '}' || c == ']' || c == ':');
        }
    }

    void step_nested(unsigned char c) {
        if (c == '"') {
            expects_ = Expects::kText;
        } else if (c == '{' || c == '[') {
            ++depth_;
        } else if ((c == '}' || c == ']') && --depth_ == 0) {
            expects_ = Expects::kCommaOrEnd;
        }
    }

    void end_text() {
        if (depth_ > 0) {
            expects_ = Expects::kNested;
            return;
        }
        if (is_model_) end_ = at_ + 1;
        keeps_ = false;
        expects_ = Expects::kCommaOrEnd;
    }

    void end_member(unsigned char c) { expects_ = c == ',' ? Expects::kKey : Expects::kNothing; }

    bool keep(unsigned char c) {
        token_ += static_cast<char>(c);
        if (token_.size() <= kMostNameBytes) return true;
        is_too_long_ = true;
        expects_ = Expects::kNothing;
        return false;
    }

    void match(unsigned unit) {
        const bool fits = matched_ < kWanted.size() && unit == static_cast<unsigned char>(kWanted[matched_]);
        matched_ = fits ? matched_ + 1 : kNoMatch;
    }

    void refuse_if(bool is_fault) {
        if (!is_fault) return;
        is_object_ = false;
        expects_ = Expects::kNothing;
    }

    Expects expects_ = Expects::kObject;
    bool is_object_ = true;
    bool is_model_ = false;  // the member that is being read
    bool keeps_ = false;     // the text that is being read
    bool is_too_long_ = false;
    std::string token_;
    int64_t at_ = 0;
    int64_t mark_ = 0;   // bytes of the byte order mark
    int64_t depth_ = 0;  // of the value, below the top level
    size_t matched_ = 0;
    unsigned unit_ = 0;
    int digits_ = 0;
    int64_t named_ = 0;
    int64_t start_ = -1;
    int64_t end_ = -1;
};

}  // namespace

PYBIND11_MODULE(_json_scan, module) {
    py::class_<JsonScan>(module, "JsonScan", "Finds the top-level `model` of a JSON object that comes in pieces.")
        .def(py::init<>())
        .def(
            "feed", [](JsonScan& self, const py::bytes& data) { self.feed(std::string_view(data)); }, py::arg("data"),
            "Take the next piece.")
        .def_property_readonly("is_object", &JsonScan::is_object, "Whether it can still be an object in UTF-8.")
        .def_property_readonly("ended", &JsonScan::ended, "Whether the object is at its end, or is none.")
        .def_property_readonly("named", &JsonScan::named, "How often `model` came with a value, or the start of one.")
        .def_property_readonly("start", &JsonScan::start,
                               "Where the last `model`'s string begins, with its quote; -1 if that is no string.")
        .def_property_readonly("end", &JsonScan::end, "Where that string ends; -1 while it does not.")
        .def_property_readonly("token", &JsonScan::token, "That string as it came.")
        .def_property_readonly("is_too_long", &JsonScan::is_too_long, "Whether a `model` had more than 4096 bytes.");
}
